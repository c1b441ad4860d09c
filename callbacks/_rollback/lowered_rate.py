"""A lower learning rate for some updates, whoever owns the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks.learning_rate import LearningRateSchedule


class LoweredRate:
    """Multiplies a factor into the rates of an update; nothing of it is left in the optimizer afterwards.

    Our own schedule takes the factor in, and logs it. Rates of anybody else are lowered for the optimizer's step alone,
    in its own hooks, which a step that a loss scaler skips does not run: no scheduler reads a lowered rate, and none
    that is restored undoes it.

    Args:
        trainer: In training.
        factor: Of the updates applied so far.
        updates: Gives how many that are.
    """

    def __init__(self, trainer: Trainer, factor: Callable[[int], float], *, updates: Callable[[], int]) -> None:
        self._factor, self._updates = factor, updates
        self._kept: list[tuple[dict[str, Any], Any]] = []
        schedules = [c for c in trainer.callbacks if isinstance(c, LearningRateSchedule)]  # type: ignore[attr-defined]
        self._schedule = schedules[0] if schedules else None
        self._hooks: list[RemovableHandle] = []
        if self._schedule is not None:
            self._schedule.follow(factor)
            return
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                self._hooks.append(optimizer.register_step_pre_hook(self._lower))
                self._hooks.append(optimizer.register_step_post_hook(self._raise_again))

    def _lower(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        factor = self._factor(self._updates())
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._kept.append((group, rate.clone() if isinstance(rate, torch.Tensor) else rate))
            if isinstance(rate, torch.Tensor):
                rate.mul_(factor)
            else:
                group["lr"] = rate * factor

    def _raise_again(self, *_: Any) -> None:
        for group, rate in self._kept:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._kept = []

    def close(self) -> None:
        """Leave the schedule and the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._raise_again()  # of a step that failed
        if self._schedule is not None:
            self._schedule.follow(None)
