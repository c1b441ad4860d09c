"""How many tokens a batch uses, over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import TokenAccounting

TokensPerBatch = int | Callable[[Any], int] | None


def check_tokens_per_batch(setting: TokensPerBatch, *, owner: str) -> None:
    """Refuse what is neither a whole number of at least 1 nor a function."""
    if setting is None or callable(setting):
        return
    if isinstance(setting, bool) or not isinstance(setting, int) or setting < 1:
        raise ConfigError(
            f"{owner}.tokens_per_batch={setting!r} must be a whole number of at least 1, or a function of the batch."
        )


def tokens_in(batch: Any, trainer: Trainer, setting: TokensPerBatch) -> float | None:
    """Tokens of one batch over all data-parallel ranks.

    Args:
        batch: This rank's batch.
        trainer: Its data module is asked where ``setting`` is None; it knows the tokens of a whole update.
        setting: Tokens of one rank's batch, or a function of the batch; the other data-parallel ranks are taken to
            have as many. Ranks that share a batch (tensor, pipeline and context parallel) are not counted.

    Returns:
        None where nobody knows.
    """
    if setting is None:
        datamodule = getattr(trainer, "datamodule", None)
        if not isinstance(datamodule, TokenAccounting):
            return None
        return datamodule.tokens_per_update / _full_accumulation(trainer)
    own = setting(batch) if callable(setting) else setting
    return own * data_parallel_size(trainer)


def data_parallel_size(trainer: Trainer) -> int:
    """Ranks that read different data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return max(1, int(sampler["num_replicas"])) if sampler else 1


def _full_accumulation(trainer: Trainer) -> int:
    """Microbatches of an update of full size, also while ``BatchSizeRamp`` makes smaller ones."""
    ramps = [getattr(c, "full_accumulation", 0) for c in trainer.callbacks]  # type: ignore[attr-defined]
    return max(ramps, default=0) or int(trainer.accumulate_grad_batches)
