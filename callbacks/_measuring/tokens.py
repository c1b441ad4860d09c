"""How many tokens a batch uses, over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lit_pretrain.callbacks._everywhere import everywhere
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
        return datamodule.tokens_per_update / full_accumulation(trainer)
    return own_tokens(batch, setting) * data_parallel_size(trainer)


def own_tokens(batch: Any, setting: int | Callable[[Any], int]) -> int:
    """Tokens of this rank's batch.

    Raises:
        ConfigError: The function gave something else than a whole number of at least 0.
    """
    if not callable(setting):
        return setting
    given: Any = setting(batch)
    try:
        is_bool = isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")
        found = None if is_bool or isinstance(given, str) else int(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None; NaN; infinity; a tensor of several numbers
        found = None
    if found is None or found != given or found < 0:
        raise ConfigError(
            f"tokens_per_batch gave {given!r} for a batch, and has to give a whole number of at least 0: the tokens of "
            "this rank's batch."
        )
    return found


class TokenCount:
    """Tokens of whole windows over all data-parallel ranks.

    Ranks are taken to have as many tokens as each other where a number says how many, or the data module. Where a
    function does, their numbers are added up at the end of every window, in a gloo group: every rank waits for that.

    Making the object is a collective call, and so is every other one.

    Args:
        trainer: After its process group was initialised.
        setting: As for ``tokens_in``.
    """

    def __init__(self, trainer: Trainer, setting: TokensPerBatch) -> None:
        self._trainer, self._setting = trainer, setting
        self._group: Any = None
        self._window = 0.0
        self._problem: ConfigError | None = None
        if callable(setting) and data_parallel_size(trainer) > 1 and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def add(self, batch: Any) -> None:
        """A microbatch was read."""
        try:
            if self._group is not None and callable(self._setting):
                self._window += own_tokens(batch, self._setting)
            else:
                self._window += tokens_in(batch, self._trainer, self._setting) or 0.0
        except ConfigError as error:
            if self._group is None:
                raise
            self._problem = error

    def take(self) -> float:
        """The window is over: its tokens.

        Raises:
            ConfigError: As ``own_tokens`` of any rank, on all of them.
        """
        window, self._window = self._window, 0.0
        if self._group is None:
            return window
        summed = torch.tensor([window, float(self._problem is not None)], dtype=torch.float64)
        dist.all_reduce(summed, group=self._group)
        if summed[1] > 0:
            everywhere(self._trainer, self._complain)
        sharing = self._trainer.world_size // data_parallel_size(self._trainer)  # ranks that read the same batch
        return float(summed[0]) / sharing

    def _complain(self) -> None:
        if self._problem is not None:
            raise self._problem


def data_parallel_size(trainer: Trainer) -> int:
    """Ranks that read different data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return max(1, int(sampler["num_replicas"])) if sampler else 1


def full_accumulation(trainer: Trainer) -> int:
    """Microbatches of an update of full size, also while ``BatchSizeRamp`` makes smaller ones."""
    ramps = [getattr(c, "full_accumulation", 0) for c in trainer.callbacks]  # type: ignore[attr-defined]
    return max(ramps, default=0) or int(trainer.accumulate_grad_batches)
