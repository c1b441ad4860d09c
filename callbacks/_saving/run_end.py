"""The end of a run that a callback has decided on: now, and saved."""

from __future__ import annotations

import json
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks.run_checkpoint import RunCheckpoint

FILE = "stopped.json"


class RunEnd:
    """Stops where its owner says, whatever the trainer's minimum; leaves the trainer as it was.

    Args:
        owner: What checkpoints of the end are named after.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._minimum: tuple[int | None, int | None] = (None, None)

    def begin(self, trainer: Trainer) -> None:
        """Training starts: an earlier end of the run is no end any more."""
        if trainer.is_global_zero:
            self._file(trainer).unlink(missing_ok=True)

    def stop(self, trainer: Trainer) -> None:
        """With the update in progress, also where ``min_steps`` or ``min_epochs`` are not reached: it would go on."""
        trainer.should_stop = True
        self._minimum = loops.lift_minimum(trainer)

    def save(self, trainer: Trainer, *, reason: str | None) -> None:
        """In ``on_train_end``: leave a word why, and a checkpoint, if nobody else saves the end.

        It stands beside the checkpoints of Lightning's callback, where there are any. Every rank calls it.

        Args:
            trainer: At its end.
            reason: One sentence; None where the owner did not end the run.
        """
        if reason is not None and trainer.is_global_zero and not _compat.is_debugging(trainer):
            words = {"by": self._owner, "reason": reason, "updates": trainer.global_step}
            self._file(trainer).parent.mkdir(parents=True, exist_ok=True)
            self._file(trainer).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
        if any(isinstance(c, RunCheckpoint) for c in trainer.callbacks):  # type: ignore[attr-defined]
            return
        theirs = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
        if theirs and not _compat.is_debugging(trainer):
            name = f"{self._owner}-step-{trainer.global_step:08d}{_compat.checkpoint_suffix(trainer)}"
            trainer.save_checkpoint(Path(theirs[0]) / name)

    @staticmethod
    def _file(trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir).expanduser() / FILE

    def close(self, trainer: Trainer) -> None:
        """Give the trainer its minimum back."""
        loops.set_minimum(trainer, self._minimum)
        self._minimum = (None, None)
