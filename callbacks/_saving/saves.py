"""Saves whose failure every rank hears of: rank 0 writes, and ranks that are not told would wait for it for ever."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_pretrain.callbacks import _compat
from lit_pretrain.distributed.checkpoint.manifest import CheckpointError
from lit_pretrain.errors import ConfigError


def save(trainer: Trainer, path: Path) -> None:
    """``Trainer.save_checkpoint``. Every rank calls it.

    Raises:
        ConfigError: On every rank, when rank 0 could not write, or could not write the last one in the background.
        OSError: On rank 0, likewise, of a plugin that raises it; the other ranks raise a ConfigError.
    """
    failure: Exception | None = None
    try:
        trainer.save_checkpoint(path, weights_only=False)
    except (ConfigError, OSError) as error:
        failure = error
        trainer.strategy.barrier("lit_pretrain: a save failed")  # the others stand in that of Trainer.save_checkpoint
    _raise_together(trainer, failure)


def wait(trainer: Trainer) -> None:
    """Return when the last checkpoint is on the disk. Every rank calls it.

    Raises:
        ConfigError: On every rank, when it could not be written.
    """
    failure: Exception | None = None
    try:
        _compat.wait_for_save(trainer)
    except (ConfigError, OSError) as error:
        failure = error
    _raise_together(trainer, failure)


def settle(trainer: Trainer) -> None:
    """Let a save in the background end while an exception, which must not be hidden, is under way; on one rank."""
    try:
        _compat.wait_for_save(trainer)
    except Exception as error:
        rank_zero_warn(f"The last save had failed: {error}")


def _raise_together(trainer: Trainer, failure: Exception | None) -> None:
    said: str | None = None if failure is None else str(failure)
    if trainer.world_size > 1:
        said = trainer.strategy.broadcast(said)
    if failure is not None:
        raise failure
    if said is not None:
        raise CheckpointError(said)
