"""The private names of Lightning and torch that the precision plugin leans on, each with why and when it can go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

_HELD = "held back by a skipped update"


def multiply_and_check(tensors: Sequence[Tensor], factor: float, found: Tensor) -> None:
    """Multiply tensors in place, and set ``found`` to 1 if any holds an inf or NaN; in one pass, without a wait.

    The kernel of torch's own GradScaler, which has no public name; ``torch._foreach_mul_`` and a norm would read the
    gradients twice (torch 2.13).

    Args:
        tensors: One dtype, one device, plain.
        factor: A power of two.
        found: 0-d, float32, on the same device.
    """
    inverse = torch.full((), factor, dtype=torch.float32, device=found.device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, inverse)


def dense(gradient: Tensor) -> Tensor:
    """What a gradient holds in memory: of a sparse one its values, which torch shows of a summed-up one only."""
    return gradient._values() if gradient.is_sparse else gradient


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a norm keeps means of what it saw; torch's kernels take its weights in their type only (torch 2.13)."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def hold_schedulers(configs: Sequence[Any]) -> None:
    """Keep Lightning from stepping the learning-rate schedulers for the update in progress.

    The loop steps every scheduler whose ``interval`` is "step", whether the update was applied or not; it offers no
    hook to say so. Can go when a skipped update skips schedulers upstream (lightning 2.6 does not).
    """
    for config in configs:
        if config.interval == "step":
            config.interval = _HELD


def release_schedulers(configs: Sequence[Any]) -> None:
    """Undo :func:`hold_schedulers`; before the next batch."""
    for config in configs:
        if config.interval == _HELD:
            config.interval = "step"


def is_training(module: LightningModule) -> bool:
    """Whether the batch in progress is one to train on, and not one of a validation within training."""
    trainer: Any = module._trainer
    return trainer is not None and bool(trainer.training)


def should_log(trainer: Trainer) -> bool:
    """Whether what is logged in this training batch reaches the loggers; the trainer says so by private names only."""
    return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)  # type: ignore[attr-defined]


def strategy_of(module: Any) -> Any:
    """The strategy of a module's trainer; None without a trainer (``LightningModule.trainer`` raises there)."""
    trainer = getattr(module, "_trainer", None)
    return None if trainer is None else trainer.strategy
