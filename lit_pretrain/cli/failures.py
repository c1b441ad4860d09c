"""Which rank failed first, and with what: each writes its error as JSON, the launcher picks the cause.

No torch, no Hydra, no Lightning.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from lit_pretrain.errors import ConfigError, RankError

FOLDER = "errors"
"""Inside the run folder: one file per failed rank."""

SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|NCCL (error|communicator was aborted)"
    r"|ncclRemoteError|Watchdog caught collective operation timeout|SIGTERMException|Socket Timeout",
    re.IGNORECASE,
)
"""What a rank says when another one has gone: never the first choice for a cause."""


FULL_BYTES = 64 * 1024
"""A disk with less free space is taken for full: not even a report fits."""


def write(run_dir: Path, rank: int, error: BaseException) -> bool:
    """Leave a rank's error in the run folder, complete or not at all; whether that worked (a disk may be full)."""
    text = f"{type(error).__name__}: {error}"
    report = {
        "rank": rank,
        "time": time.time(),
        "message": str(error),
        "user_error": isinstance(error, ConfigError),
        "secondary": SECONDARY.search(text) is not None,
        "traceback": "".join(traceback.format_exception(error)),
    }
    path = run_dir / FOLDER / f"rank{rank}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(report), encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        return False
    return True


def first(run_dir: Path, codes: Mapping[int, int], seen: Mapping[int, float]) -> Exception:
    """The error most likely to be the cause.

    Args:
        run_dir: Holds the reports.
        codes: Rank to exit code, of ranks that ended by themselves; negative for a signal.
        seen: Rank to the time its end was noticed, in seconds since the epoch.

    Returns:
        A ConfigError when the first rank to fail met a user's mistake, else a RankError with its traceback.
    """
    world_size = len(codes)
    reports = [json.loads(p.read_text(encoding="utf-8")) for p in sorted((run_dir / FOLDER).glob("rank*.json"))]
    primary = [r for r in reports if not r["secondary"]]
    reported = {r["rank"] for r in reports}
    killed = sorted((seen.get(rank, 0.0), rank) for rank, code in codes.items() if code < 0 and rank not in reported)
    earliest = min(primary, key=lambda r: r["time"], default=None)
    if killed and (earliest is None or killed[0][0] < earliest["time"]):
        rank = killed[0][1]
        name = signal.Signals(-codes[rank]).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return RankError(f"rank {rank} of {world_size} was killed by {name}{hint}{_log(run_dir, rank)}.")
    cause = earliest or min(reports, key=lambda r: r["time"], default=None)
    if cause is None:
        if shutil.disk_usage(run_dir).free < FULL_BYTES:
            return ConfigError(
                f"there is no space left on the disk of {run_dir}; free some, or choose another with output_root=...."
            )
        bad = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(codes.items()) if code)
        return RankError(f"ranks ended without a report (exit codes: {bad}); look at {run_dir}/rank*.log.")
    if cause["user_error"]:
        return ConfigError(cause["message"])
    return RankError(f"rank {cause['rank']} of {world_size} failed:\n{cause['traceback'].rstrip()}")


def _log(run_dir: Path, rank: int) -> str:
    return f"; its output is in {run_dir}/rank{rank}.log" if rank else ""
