"""How a run ends: a validation of the final weights, and a checkpoint of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.instantiate import checkpoints


class Closing(Callback):
    """At the last update: validate, whatever the interval; then save, unless a checkpoint was due there anyway.

    The validation runs inside ``fit``, so ``val/loss`` in checkpoints, hyper-parameters and results is that of the
    final weights. Saves for a ModelCheckpoint only: RunCheckpoint does so itself.
    """

    order = 79  # just before checkpoint callbacks

    def __init__(self) -> None:
        self._saved_at: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask for the end, which makes Lightning validate first; it would stop here anyway."""
        by_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        epochs = trainer.max_epochs
        by_epochs = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs and trainer.is_last_batch
        if by_steps or by_epochs:
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note every save, whoever asked for it."""
        self._saved_at = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final weights. Every rank calls it."""
        folder = checkpoint_folder(trainer)
        if not isinstance(trainer.checkpoint_callback, ModelCheckpoint):
            return  # it saves the end itself, or was told not to
        if folder is not None and self._saved_at != trainer.global_step:
            trainer.save_checkpoint(folder / checkpoints.LAST, weights_only=False)


def checkpoint_folder(trainer: Trainer) -> Path | None:
    """Where the run saves; None when it does not."""
    saver = trainer.checkpoint_callback
    dirpath = getattr(saver, "dirpath", None)  # ModelCheckpoint and RunCheckpoint
    if trainer.fast_dev_run or dirpath is None:  # type: ignore[attr-defined]
        return None
    return Path(dirpath)
