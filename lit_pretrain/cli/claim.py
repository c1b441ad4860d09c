"""A run folder belongs to one run: nobody else trains in it meanwhile, and what it trained is not written over."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import checkpoints


class InUseError(ConfigError):
    """The folder belongs to another run: nothing may be written there, not even this failure."""


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Have a run folder for oneself; the operating system gives it back when the process ends, however it ends.

    Curves that an earlier run left without a checkpoint stay, and TensorBoard draws both: that is said aloud.

    Args:
        run_dir: The run folder; it exists.

    Raises:
        InUseError: Another process trains in it, or it holds checkpoints.
    """
    handle = os.open(run_dir, os.O_RDONLY)  # the folder itself is locked: no file is left behind
    try:
        _lock(handle, run_dir)
        saved = checkpoints.listed(run_dir / checkpoints.FOLDER)
        if saved:
            raise InUseError(
                f"{run_dir} holds an earlier run with the checkpoint {saved[-1].name}, which this run would write "
                f"over; choose another run_id=..., or move that folder away."
            )
        if next(run_dir.glob("**/events.out.tfevents.*"), None) is not None:
            print(
                f"lit-pretrain: {run_dir} holds curves of an earlier run; TensorBoard will draw both.", file=sys.stderr
            )
        yield
    finally:
        os.close(handle)


def _lock(handle: int, run_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise InUseError(f"another process is training in {run_dir}; wait for it, or choose another run_id=....") from e
    except OSError:  # a file system without locks
        return
