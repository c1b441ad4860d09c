"""``python -m lit_pretrain.cli.worker RUN_DIR``: one rank. Reads the resolved configuration; composes nothing.

The launcher writes one line of JSON to standard input and keeps the pipe open for as long as it lives.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lit_pretrain.errors import Preempted

ORPHAN_GRACE_S = 30.0
"""From the launcher's death to the rank's own hard end: time to finish the step and save."""


def _end_with_parent() -> None:
    """End this rank when the launcher is gone, even by SIGKILL: its end of our standard input closes."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def read_line() -> bytes:
    """One line of standard input, and not a byte more: the rest is the watcher's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("lit_pretrain.cli.worker: started by hand; use lit-pretrain train.")
        line += byte
    return line


def _serve_rendezvous(listen_fd: int) -> Any:
    """Serve the store on the inherited socket; torch's ``env://`` rendezvous in this process joins it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen_fd,
    )


def main(run_dir: Path) -> int:
    """Run one rank; returns the exit code."""
    return serve(run_dir, json.loads(read_line()))


def serve(run_dir: Path, spec: Mapping[str, Any]) -> int:
    """Run one rank.

    Args:
        run_dir: The run folder, with the resolved configuration.
        spec: The launcher's word: ``sys_path``, and ``listen_fd`` for the rank that serves the rendezvous.

    Returns:
        The exit code.
    """
    rank = int(os.environ["RANK"])
    sys.path[:] = spec["sys_path"]  # -m put the working directory first; the launcher did not have it there
    _end_with_parent()
    try:
        store = _serve_rendezvous(spec["listen_fd"]) if spec["listen_fd"] is not None else None
        import yaml

        from lit_pretrain.instantiate.quiet import quiet

        quiet()
        from lit_pretrain.instantiate.job import train

        train(yaml.safe_load((run_dir / "resolved.yaml").read_text(encoding="utf-8")))
        del store
    except Preempted:
        return Preempted.EXIT_CODE
    except BaseException as e:
        from lit_pretrain.cli import failures

        reported = failures.write(run_dir, rank, e)
        if rank or not reported:
            traceback.print_exc()  # rank 0's is printed by the launcher, once, from its report
        sys.stdout.flush()
        sys.stderr.flush()
        # Leave hard: in an orderly teardown a peer may never answer a destroy or a barrier.
        os._exit(130 if isinstance(e, KeyboardInterrupt) else 1)
    return 0


def leave(status: int) -> NoReturn:
    """End this process.

    Everything is written and closed. An orderly end would unload gloo while its threads may still run, and now and then
    abort a rank that had finished ("terminate called without an active exception", torch 2.13).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
