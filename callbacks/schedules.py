"""The learning-rate schedules: one curve each over the shared mechanism."""

from __future__ import annotations

from typing import Any, ClassVar

from lit_pretrain import schedules
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules import DecayShape


class WarmupCosine(LearningRateSchedule):
    """Linear warmup, then half a cosine from the peak down to ``min_ratio`` of it at the last update.

    Example::

        trainer = Trainer(max_steps=10_000, callbacks=[WarmupCosine(warmup_steps=500)])
    """

    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """``lit_pretrain.schedules.cosine``."""
        return schedules.cosine(
            x, warmup=warmup, total=total, min_ratio=self.min_ratio, start_ratio=start_ratio, unit=unit
        )


class WarmupLinear(LearningRateSchedule):
    """Linear warmup, then a straight line from the peak down to ``min_ratio`` of it at the last update."""

    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """``lit_pretrain.schedules.linear``."""
        return schedules.linear(
            x, warmup=warmup, total=total, min_ratio=self.min_ratio, start_ratio=start_ratio, unit=unit
        )


class WarmupStableDecay(LearningRateSchedule):
    """Linear warmup, the peak, then a short decay to ``min_ratio`` of it at the last update (WSD).

    Args:
        decay_fraction: Length of the decay as a share of the horizon, above 0.
        shape: Of the decay: ``linear``, ``cosine`` or ``1-sqrt``.
        **settings: As for every schedule, see ``LearningRateSchedule``.
    """

    def __init__(self, *, decay_fraction: float = 0.2, shape: DecayShape = "1-sqrt", **settings: Any) -> None:
        if not 0.0 < decay_fraction <= 1.0:
            raise ConfigError(f"schedule.decay_fraction={decay_fraction} must be above 0 and at most 1.")
        super().__init__(**settings)
        self.decay_fraction = decay_fraction
        self.shape: DecayShape = shape

    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """``lit_pretrain.schedules.wsd``, its decay at least one update long."""
        return schedules.wsd(
            x,
            warmup=warmup,
            total=total,
            decay=max(unit, self.decay_fraction * total),
            shape=self.shape,
            min_ratio=self.min_ratio,
            start_ratio=start_ratio,
            unit=unit,
        )


class WarmupInverseSqrt(LearningRateSchedule):
    """Linear warmup, then ``sqrt(warmup / position)``, down to ``min_ratio``.

    It needs no horizon. With ``total_steps`` or ``total_tokens`` the fall is stretched to end at exactly ``min_ratio``.
    """

    needs_horizon: ClassVar[bool] = False

    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """``lit_pretrain.schedules.inverse_sqrt``."""
        return schedules.inverse_sqrt(
            x, warmup=warmup, total=total, min_ratio=self.min_ratio, start_ratio=start_ratio, unit=unit
        )


class WarmupConstant(LearningRateSchedule):
    """Linear warmup, then the peak for ever; ``min_ratio`` has no meaning here. It needs no horizon."""

    needs_horizon: ClassVar[bool] = False

    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """``lit_pretrain.schedules.constant``."""
        return schedules.constant(x, warmup=warmup, start_ratio=start_ratio, unit=unit)
