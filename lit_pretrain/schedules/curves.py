"""Learning-rate curves as pure functions: what share of its peak a rate has during one update.

One convention for all of them. ``x`` counts what was used before the update (0 for the first one) and ``unit`` what
the update itself uses: ``x = u, unit = 1`` counts updates, ``x = tokens so far, unit = tokens per update`` counts
tokens. An update is judged by where it ends, ``x + unit``, so:

=================================  =======================================================================
update                             factor
=================================  =======================================================================
the first                          ``unit / warmup``, or ``start_ratio``; never 0, which would waste it
the one that ends the warmup       exactly 1
the last (ends at ``total``)       exactly ``min_ratio``
later ones                         ``min_ratio``
``warmup`` 0 or one ``unit``       the first update runs at exactly 1
``warmup == total``                the last update runs at exactly 1, later ones at ``min_ratio``
``warmup > total``                 ConfigError: the peak would never be reached
=================================  =======================================================================

Source: Vaswani et al. 2017, section 5.3 (inverse square root); Loshchilov & Hutter 2017 (cosine); Hu et al. 2024,
MiniCPM, section 4 (warmup-stable-decay); Hägele et al. 2024 (the 1-sqrt decay).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from lit_pretrain.errors import ConfigError

DecayShape = Literal["linear", "cosine", "1-sqrt"]


def _fall_linear(progress: float) -> float:
    return 1.0 - progress


def _fall_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _fall_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


_FALLS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"linear": _fall_linear, "cosine": _fall_cosine, "1-sqrt": _fall_sqrt}
)


def check(
    *,
    warmup: float,
    total: float,
    min_ratio: float = 0.1,
    start_ratio: float | None = None,
    unit: float = 1.0,
    decay: float | None = None,
) -> None:
    """Refuse a curve that cannot be drawn.

    Args:
        warmup: Length of the warmup, in the counter's units.
        total: Length of the run; ``inf`` where the curve needs no end.
        min_ratio: Last rate over peak rate, 0 to 1.
        start_ratio: First rate over peak rate, above 0 up to 1; None for ``unit / warmup``.
        unit: What one update uses.
        decay: Length of the final decay of ``wsd``.

    Raises:
        ConfigError: With the setting, its value and the rule.
    """
    if not (math.isfinite(warmup) and warmup >= 0):
        raise ConfigError(f"schedule.warmup={warmup} must be a finite number of at least 0.")
    if not unit > 0:
        raise ConfigError(f"schedule.unit={unit} must be above 0: every update has to move the counter.")
    if not total > 0:
        raise ConfigError(f"schedule.total={total} must be above 0.")
    if warmup > total:
        raise ConfigError(
            f"schedule.warmup={warmup:g} must not exceed schedule.total={total:g}, or the peak is never reached; "
            "shorten the warmup or lengthen the run."
        )
    if not 0.0 <= min_ratio <= 1.0:
        raise ConfigError(f"schedule.min_ratio={min_ratio} must lie between 0 and 1.")
    if start_ratio is not None and not 0.0 < start_ratio <= 1.0:
        raise ConfigError(
            f"schedule.start_ratio={start_ratio} must be above 0 (a rate of 0 wastes the first update) and at most 1."
        )
    if decay is not None and not 0 < decay <= total - warmup:
        raise ConfigError(
            f"schedule.decay={decay:g} must be above 0 and fit after the warmup of {warmup:g} in a total of {total:g}."
        )


def _factor(
    x: float,
    fall: Callable[[float, float], float],
    *,
    warmup: float,
    total: float,
    min_ratio: float,
    start_ratio: float | None,
    unit: float,
) -> float:
    """The shared rise and the shared ends; ``fall(end, top)`` gives the curve between them, 1 down to ``min_ratio``."""
    if x < 0:
        raise ConfigError(f"schedule position x={x} must not be negative.")
    if x >= total:
        return min_ratio
    end, top = x + unit, max(warmup, unit)
    if end == top:
        return 1.0
    if end < top:
        return end / top if start_ratio is None else start_ratio + (1.0 - start_ratio) * x / (top - unit)
    return min_ratio if end >= total else fall(end, top)


def cosine(
    x: float,
    *,
    warmup: float,
    total: float,
    min_ratio: float = 0.1,
    start_ratio: float | None = None,
    unit: float = 1.0,
) -> float:
    """Linear rise, then half a cosine from 1 at the end of the warmup to ``min_ratio`` at the last update."""
    check(warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)

    def fall(end: float, top: float) -> float:
        return min_ratio + (1.0 - min_ratio) * _fall_cosine((end - top) / (total - top))

    return _factor(x, fall, warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)


def linear(
    x: float,
    *,
    warmup: float,
    total: float,
    min_ratio: float = 0.1,
    start_ratio: float | None = None,
    unit: float = 1.0,
) -> float:
    """Linear rise, then a straight line from 1 at the end of the warmup to ``min_ratio`` at the last update."""
    check(warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)

    def fall(end: float, top: float) -> float:
        return min_ratio + (1.0 - min_ratio) * _fall_linear((end - top) / (total - top))

    return _factor(x, fall, warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)


def wsd(
    x: float,
    *,
    warmup: float,
    total: float,
    decay: float,
    shape: DecayShape = "1-sqrt",
    min_ratio: float = 0.1,
    start_ratio: float | None = None,
    unit: float = 1.0,
) -> float:
    """Warmup, stable, decay: 1 until ``total - decay``, then down to ``min_ratio`` at the last update.

    Args:
        x: What was used before this update.
        warmup: Length of the rise.
        total: Length of the run.
        decay: Length of the fall, in the counter's units.
        shape: ``linear``, ``cosine`` or ``1-sqrt``.
        min_ratio: Last rate over peak rate.
        start_ratio: First rate over peak rate; None for ``unit / warmup``.
        unit: What one update uses.
    """
    check(warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit, decay=decay)
    if shape not in _FALLS:
        raise ConfigError(f"schedule.shape={shape!r} is unknown; use one of {', '.join(_FALLS)}.")

    def fall(end: float, top: float) -> float:
        knee = max(total - decay, top)
        return 1.0 if end <= knee else min_ratio + (1.0 - min_ratio) * _FALLS[shape]((end - knee) / (total - knee))

    return _factor(x, fall, warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)


def inverse_sqrt(
    x: float,
    *,
    warmup: float,
    total: float = math.inf,
    min_ratio: float = 0.1,
    start_ratio: float | None = None,
    unit: float = 1.0,
) -> float:
    """Linear rise, then ``sqrt(warmup / position)``.

    Without a ``total`` the curve falls for ever, down to ``min_ratio``. With one it is stretched downwards so that the
    last update runs at exactly ``min_ratio``.
    """
    check(warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)

    def fall(end: float, top: float) -> float:
        height = math.sqrt(top / end)
        if math.isinf(total):
            return max(min_ratio, height)
        floor = math.sqrt(top / total)
        return min_ratio + (1.0 - min_ratio) * (height - floor) / (1.0 - floor)

    return _factor(x, fall, warmup=warmup, total=total, min_ratio=min_ratio, start_ratio=start_ratio, unit=unit)


def constant(x: float, *, warmup: float, start_ratio: float | None = None, unit: float = 1.0) -> float:
    """Linear rise, then 1 for ever: the one curve without an end."""
    check(warmup=warmup, total=math.inf, start_ratio=start_ratio, unit=unit)
    return _factor(
        x,
        lambda end, top: 1.0,
        warmup=warmup,
        total=math.inf,
        min_ratio=1.0,
        start_ratio=start_ratio,
        unit=unit,
    )
