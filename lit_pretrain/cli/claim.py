"""A run folder belongs to one run: nobody else trains in it meanwhile."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_pretrain.errors import ConfigError


class InUseError(ConfigError):
    """The folder belongs to another run: nothing may be written there, not even this failure."""


@contextmanager
def claimed(run_dir: Path) -> Iterator[int]:
    """Have a run folder for oneself; the operating system gives it back when the process ends, however it ends.

    A process that inherits the descriptor given here has the folder too, for as long as it lives: ranks still save when
    the command that started them was killed.

    Args:
        run_dir: The run folder; it exists.

    Raises:
        InUseError: Another process trains in it.
    """
    handle = os.open(run_dir, os.O_RDONLY)  # the folder itself is locked: no file is left behind
    try:
        _lock(handle, run_dir)
        yield handle
    finally:
        os.close(handle)


def earlier_curves(run_dir: Path) -> str:
    """A sentence when an earlier run left curves, but no checkpoint: TensorBoard would draw both. Empty otherwise."""
    if next(run_dir.glob("**/events.out.tfevents.*"), None) is None:
        return ""
    return f"{run_dir} holds curves of an earlier run; TensorBoard will draw both."


def _lock(handle: int, run_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise InUseError(
            f"another process is training in {run_dir}, or saves there before it ends; wait for it, or choose another "
            f"run_id=...."
        ) from e
    except OSError:  # a file system without locks
        return
