"""Lightning's EarlyStopping over a resume: what it knew comes back, what the user says now counts."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info


def patiences(trainer: Trainer) -> list[tuple[EarlyStopping, int]]:
    """Every EarlyStopping with the patience that the user gave it; ask before anything is restored."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [(c, c.patience) for c in callbacks if isinstance(c, EarlyStopping)]


def resume(trainer: Trainer, given: list[tuple[EarlyStopping, int]]) -> None:
    """Let the user's patience win over the checkpoint's, and stop a run again that had been stopped.

    Lightning restores the patience, so that a raised one would have no effect; and it restores what stopped a run, but
    not the stop.

    Args:
        trainer: With restored callbacks.
        given: From :func:`patiences`.
    """
    for callback, patience in given:
        if callback.patience != patience:
            rank_zero_info(
                f"EarlyStopping({callback.monitor!r}).patience was {callback.patience} in the checkpoint and is "
                f"{patience} now: {patience} counts."
            )
            callback.patience = patience
            exhausted = callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
            if exhausted and callback.wait_count < patience:
                callback.stopping_reason = EarlyStoppingReason.NOT_STOPPED
                callback.stopping_reason_message, callback.stopped_epoch = None, 0
    if any(callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED for callback, _ in given):
        trainer.should_stop = True
