"""A learning-rate schedule in numbers: its warmup, its decay, and the rate of the first and the last update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from lit_pretrain import schedules
from lit_pretrain.schedules import Horizon

_WARMUPS = ("warmup_steps", "warmup_tokens", "warmup_fraction", "total_steps", "total_tokens")


@dataclass(frozen=True, kw_only=True)
class RatePlan:
    """What a schedule does over one run.

    Args:
        warmup_updates: Updates until the peak; with a fraction where the warmup is given in tokens.
        decay_updates: Updates from the end of the peak to the end of the run; 0 where nothing falls.
        first: Rate of the first update over the peak rate.
        last: Rate of the last update over the peak rate.
    """

    warmup_updates: float
    decay_updates: float
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class _Curve:
    draw: Callable[..., float]
    is_endless: bool = False
    takes_min_ratio: bool = True


# By the class of ``lit_pretrain.callbacks`` that writes the rates, which cannot be loaded without torch.
_CURVES: Mapping[str, _Curve] = MappingProxyType(
    {
        "WarmupCosine": _Curve(draw=schedules.cosine),
        "WarmupLinear": _Curve(draw=schedules.linear),
        "WarmupStableDecay": _Curve(draw=schedules.wsd),
        "WarmupInverseSqrt": _Curve(draw=schedules.inverse_sqrt, is_endless=True),
        "WarmupConstant": _Curve(draw=schedules.constant, is_endless=True, takes_min_ratio=False),
    }
)
KNOWN = tuple(_CURVES)


def plan_rates(
    name: str, settings: Mapping[str, Any], *, updates: int, tokens_per_update: int, peak: float | None = None
) -> RatePlan:
    """What a schedule callback would write in a run of known length.

    Args:
        name: One of :data:`KNOWN`, the callback's class.
        settings: What its constructor is given.
        updates: Length of the run.
        tokens_per_update: Tokens of one update over all data-parallel ranks.
        peak: Peak learning rate; needed for ``start_lr`` only.

    Raises:
        ConfigError: As the callback would raise before the first step.
    """
    curve = _CURVES[name]
    horizon = Horizon(**{key: settings[key] for key in _WARMUPS if settings.get(key) is not None})
    trainer_updates = updates if horizon.needs_trainer(endless=curve.is_endless) else None
    tokens_per_update = settings.get("tokens_per_update") or tokens_per_update
    warmup, total = horizon.resolve(trainer_updates, tokens_per_update=tokens_per_update, endless=curve.is_endless)
    unit = tokens_per_update if horizon.in_tokens else 1
    start = settings.get("start_ratio")
    if settings.get("start_lr") is not None and peak:
        start = settings["start_lr"] / peak
    draw = partial(curve.draw, warmup=warmup, unit=unit, start_ratio=start)
    decay = 0.0
    if curve.takes_min_ratio:
        draw = partial(draw, total=total, min_ratio=settings.get("min_ratio", 0.1))
        decay = (total if math.isfinite(total) else updates * unit) - max(warmup, unit)
    if name == "WarmupStableDecay":
        decay = max(unit, settings.get("decay_fraction", 0.2) * total)
        draw = partial(draw, decay=decay, shape=settings.get("shape", "1-sqrt"))
    return RatePlan(
        warmup_updates=warmup / unit,
        decay_updates=decay / unit,
        first=draw(0),
        last=draw((updates - 1) * unit),
    )
