"""Failed jobs of a sweep: each writes its failure beside its run, the command prints all of them at the end.

Files, because jobs may run in other processes or on other machines (joblib, submitit), and because Hydra's basic
launcher finishes a batch and then raises the first failure only.
"""

from __future__ import annotations

import json
import os
import traceback
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from hydra.experimental.callback import Callback

from lit_pretrain.cli import hints, ranks
from lit_pretrain.cli.claim import InUseError, claimed
from lit_pretrain.cli.launch import Failed
from lit_pretrain.errors import ConfigError, RankError

FILE = "failure.json"

HELD: ContextVar[ExitStack | None] = ContextVar("held", default=None)
"""What the command holds until its sweep is over; None where no command runs it."""

MADE: ContextVar[tuple[Path, ...]] = ContextVar("made", default=())
"""The log file of a single run, its folder and those above it that were not there before; innermost first."""


def leave_nothing() -> None:
    """Take away what Hydra made for a run that was refused: the empty log file and the empty folders."""
    for path in MADE.get():
        with suppress(OSError):  # something else lies in it by now
            if path.is_dir():
                path.rmdir()
            elif path.stat().st_size == 0:
                path.unlink()


def clear(run_dir: Path) -> None:
    """Forget an earlier failure of a run that starts again."""
    (run_dir / FILE).unlink(missing_ok=True)


def write(run_dir: Path, overrides: list[str], error: BaseException) -> None:
    """Leave a job's failure in its folder, complete or not at all."""
    if isinstance(error, (ConfigError, RankError)):
        text = str(error)
    elif hints.knows(error):
        text = hints.explain(error, "train", overrides)
    else:
        text = "".join(traceback.format_exception(error))
    run_dir.mkdir(parents=True, exist_ok=True)
    draft = run_dir / f".{FILE}.tmp"
    try:
        draft.write_text(json.dumps({"overrides": overrides, "text": text}), encoding="utf-8")
        os.replace(draft, run_dir / FILE)
    finally:
        draft.unlink(missing_ok=True)


def print_failures(sweep_dir: Path, out: TextIO) -> int:
    """Print every failed job of a sweep; returns how many there were."""
    jobs = [p for p in sweep_dir.iterdir() if p.is_dir() and not p.name.startswith(".")]  # .submitit is not a job
    failed = sorted((p for p in jobs if (p / FILE).exists()), key=lambda p: (len(p.name), p.name))
    for folder in failed:
        report = json.loads((folder / FILE).read_text(encoding="utf-8"))
        words = " ".join(report["overrides"])
        print(f"\n=== job {folder.name} failed ({words}), folder {folder}\n{report['text'].rstrip()}", file=out)
    if failed:
        names = ", ".join(p.name for p in failed)
        print(f"\nlit-pretrain: {len(failed)} of {len(jobs)} jobs failed: {names}", file=out)
    return len(failed)


class SweepReport(Callback):
    """Hydra callback that takes the sweep's folder, notes where it is, and clears what an earlier sweep left there.

    Hydra skips the end of a sweep's callbacks when a job raises, so only the start is used.

    Args:
        note: File to write the sweep's folder to; null where no command waits for it.
    """

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Hydra calls this before it makes the folder of a single run."""
        MADE.set(())
        with suppress(Exception):  # Hydra makes a warning of it, and says the same once more a moment later
            run_dir = Path(str(config.hydra.run.dir)).absolute()
            places = (run_dir / f"{config.hydra.job.name}.log", run_dir, *run_dir.parents)
            MADE.set(tuple(place for place in places if not place.exists()))

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Hydra calls this before the first job.

        Raises:
            Failed: Another sweep runs under this name.
        """
        sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        held = HELD.get()
        if held is not None and ranks.external() is None:  # ranks of somebody else's are refused, with the reason
            try:
                sweep_dir.mkdir(parents=True, exist_ok=True)
                held.enter_context(claimed(sweep_dir))
            except (InUseError, OSError) as e:
                raise Failed from e  # Hydra makes a warning of an Exception here
        for old in sweep_dir.glob(f"*/{FILE}"):
            old.unlink()
        if self.note:
            Path(self.note).write_text(str(sweep_dir), encoding="utf-8")
