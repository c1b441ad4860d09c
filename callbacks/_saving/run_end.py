"""The end of a run that a callback has decided on: now, and saved."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks.run_checkpoint import RunCheckpoint


class RunEnd:
    """Stops where its owner says, whatever the trainer's minimum; leaves the trainer as it was.

    Args:
        owner: What checkpoints of the end are named after.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._minimum: tuple[int | None, int | None] = (None, None)

    def stop(self, trainer: Trainer) -> None:
        """With the update in progress, also where ``min_steps`` or ``min_epochs`` are not reached: it would go on."""
        trainer.should_stop = True
        self._minimum = loops.lift_minimum(trainer)

    def save(self, trainer: Trainer) -> None:
        """In ``on_train_end``, if nobody saves the end: beside the checkpoints of Lightning's callback, where there are
        any. Every rank calls it.
        """  # noqa: D205
        if any(isinstance(c, RunCheckpoint) for c in trainer.callbacks):  # type: ignore[attr-defined]
            return
        theirs = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
        if theirs and not _compat.is_debugging(trainer):
            name = f"{self._owner}-step-{trainer.global_step:08d}{_compat.checkpoint_suffix(trainer)}"
            trainer.save_checkpoint(Path(theirs[0]) / name)

    def close(self, trainer: Trainer) -> None:
        """Give the trainer its minimum back."""
        loops.set_minimum(trainer, self._minimum)
        self._minimum = (None, None)
