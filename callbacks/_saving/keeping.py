"""Which checkpoints of a folder stay."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from lightning.pytorch import Trainer

from lit_pretrain.callbacks import _compat
from lit_pretrain.distributed.checkpoint import catalog

_NAME = re.compile(r"step-(\d+)\.ckpt")


def problem_with(folder: Path) -> str:
    """Why no checkpoint could be written into a folder; empty when nothing stands in the way. Makes nothing."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to nothing"
        if place.exists():
            if not place.is_dir():
                return f"{place} is a file"
            return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"
    return ""


def earlier(folder: Path) -> str:
    """That a folder holds checkpoints already, which a run that begins would write over; empty when it does not."""
    whole = catalog.newest(folder) if folder.is_dir() else None
    found = [whole.path] if whole is not None else sorted(folder.glob("step-*.ckpt"))
    if not found:
        return ""
    return f"it holds {found[-1].name} of an earlier run (which goes on with trainer.fit(..., ckpt_path='{found[-1]}'))"


def prune(folder: Path, trainer: Trainer, *, keep_last: int, keep_every: int | None, keep: Collection[str]) -> None:
    """Remove what need not stay. Call it on one process.

    Args:
        folder: Holds the checkpoints of one run.
        trainer: Its checkpoint plugin says whether they are folders or files.
        keep_last: So many of the newest stay.
        keep_every: Those whose update is a multiple of this stay.
        keep: Names of others that stay.
    """
    if _compat.writes_folders(trainer):
        _compat.after_save(
            trainer, lambda: catalog.prune(folder, keep_last=keep_last, keep_every=keep_every, keep=set(keep))
        )
        return
    steps = {int(m[1]): path for path in folder.glob("step-*.ckpt") if (m := _NAME.fullmatch(path.name))}
    kept = {step for step, path in steps.items() if path.name in keep}
    for step in surplus(sorted(steps), keep_last=keep_last, keep_every=keep_every, keep=kept):
        trainer.strategy.remove_checkpoint(steps[step])


def surplus(steps: Sequence[int], *, keep_last: int, keep_every: int | None, keep: Collection[int]) -> list[int]:
    """Those of ``steps`` (ascending) that need not stay."""
    return [
        step
        for step in steps[:-keep_last]
        if step not in keep and not (keep_every is not None and step % keep_every == 0)
    ]
