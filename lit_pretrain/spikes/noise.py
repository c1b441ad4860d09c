"""Level and noise of a stretch of numbers, whatever its outliers do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAD_TO_SIGMA = 1.4826  # 1 / the upper quartile of a standard normal: makes the MAD of Gaussian noise its sigma
MEDIAN_TO_MEAN = 1.2533  # sqrt(pi / 2): how much wider a median scatters than a mean of the same Gaussian numbers
_BLOCK = 25  # values a trend is taken from: enough to average noise out, few enough to follow the start of a run
_LEAST_BLOCK = 5


def median(values: Sequence[float]) -> float:
    """The middle of ``values``; of an even number, the mean of the middle two.

    Args:
        values: At least one, all finite.
    """
    ranked = sorted(values)
    half = len(ranked) // 2
    # Halved first: the sum of two huge losses would be infinite.
    return ranked[half] if len(ranked) % 2 else ranked[half - 1] / 2 + ranked[half] / 2


def level(window: Sequence[float]) -> float:
    """Where a falling or a steady curve stands, on the high side.

    The lower of two medians, of everything and of the newer half. On a steep fall it lags behind by a quarter of the
    window; a rise does not pull it up before half the window has risen, and a few easy batches do not pull it down.

    Args:
        window: At least one finite value, oldest first.
    """
    return min(median(window), median(window[len(window) // 2 :]))


def detrended(window: Sequence[float]) -> list[float]:
    """``window`` without its trend: a polygon through the medians of its blocks is taken off.

    Args:
        window: At least one finite value, oldest first.
    """
    n = len(window)
    blocks = max(1, round(n / _BLOCK)) if n >= 2 * _LEAST_BLOCK else 1
    if blocks == 1 and n >= 2 * _LEAST_BLOCK:
        blocks = 2  # a short window is the start of a run, where the trend is steepest
    edges = [n * i // blocks for i in range(blocks + 1)]
    centres = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    heights = [median(window[a:b]) for a, b in pairwise(edges)]
    if blocks == 1:
        return [value - heights[0] for value in window]
    residuals, segment = [], 0
    for i, value in enumerate(window):
        while segment < blocks - 2 and i > centres[segment + 1]:
            segment += 1
        share = (i - centres[segment]) / (centres[segment + 1] - centres[segment])
        residuals.append(value - (heights[segment] + share * (heights[segment + 1] - heights[segment])))
    return residuals


def noise(window: Sequence[float]) -> float:
    """The sigma of the noise around the trend, from the median absolute residual.

    Args:
        window: At least one finite value, oldest first.
    """
    return MAD_TO_SIGMA * median([abs(residual) for residual in detrended(window)])
