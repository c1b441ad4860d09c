"""A lower learning rate for some updates, whoever owns the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_pretrain.callbacks.learning_rate import LearningRateSchedule


class LoweredRate:
    """Multiplies a factor into the rates of an update; nothing of it is left in the optimizer afterwards.

    Our own schedule takes the factor in, and logs it. Rates of anybody else are lowered for the optimizer's step alone:
    no scheduler reads a lowered one, and none that is restored undoes it.

    Args:
        trainer: In training.
        factor: Of the updates applied so far.
    """

    def __init__(self, trainer: Trainer, factor: Callable[[int], float]) -> None:
        self._factor = factor
        self._kept: list[tuple[dict[str, Any], Any]] = []
        schedules = [c for c in trainer.callbacks if isinstance(c, LearningRateSchedule)]  # type: ignore[attr-defined]
        self._schedule = schedules[0] if schedules else None
        if self._schedule is not None:
            self._schedule.follow(factor)

    def lower(self, optimizer: Any, applied_updates: int) -> None:
        """Before the optimizer's step."""
        factor = self._factor(applied_updates)
        if self._schedule is not None or factor == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._kept.append((group, rate.clone() if isinstance(rate, torch.Tensor) else rate))
            if isinstance(rate, torch.Tensor):
                rate.mul_(factor)
            else:
                group["lr"] = rate * factor

    def raise_again(self) -> None:
        """After it."""
        for group, rate in self._kept:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._kept = []

    def close(self) -> None:
        """Leave the schedule alone."""
        self.raise_again()
        if self._schedule is not None:
            self._schedule.follow(None)
