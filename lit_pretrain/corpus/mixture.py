"""How many rows of each global batch come from each source: exact shares, at any step, without random numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.errors import ConfigError

_BITS = 36  # of a share as a fixed-point number: over 10^10 rows a share is off by less than one row
_ONE = 1 << _BITS


class WeightSchedule:
    """Mixture weights as a function of the data position: straight lines between given points, constant outside.

    Args:
        points: Pairs ``(at, weights)`` with rising ``at``; weights name every source and need not add up to 1.
        unit: Whether ``at`` counts ``steps`` (global batches) or ``tokens``, both of data read.

    Raises:
        ConfigError: When a point, a weight or the unit is impossible.

    Example:
        ``WeightSchedule([(0, {"web": 9, "math": 1}), (1000, {"web": 5, "math": 5})])``
    """

    def __init__(self, points: Sequence[Sequence[Any]], *, unit: Literal["steps", "tokens"] = "steps") -> None:
        if unit not in ("steps", "tokens"):
            raise ConfigError(f"data.weights.unit={unit!r} is unknown; use steps or tokens.")
        if not points:
            raise ConfigError("data.weights.points is empty; give at least one point (0, {source: weight}).")
        self.unit = unit
        self.points: list[tuple[int, dict[str, float]]] = []
        for point in points:
            try:
                at, weights = point
                values = {str(name): float(weight) for name, weight in dict(weights).items()}
            except (TypeError, ValueError) as error:
                raise ConfigError(f"data.weights point {point!r} must be a pair (at, {{source: weight}}).") from error
            _check_weights(values)
            if isinstance(at, bool) or not isinstance(at, int) or at < 0:
                raise ConfigError(f"data.weights point at {at!r} must be a whole number of at least 0.")
            if self.points and at <= self.points[-1][0]:
                raise ConfigError(f"data.weights point at {at} must come after the one at {self.points[-1][0]}.")
            if self.points and set(values) != set(self.points[0][1]):
                raise ConfigError(
                    f"data.weights point at {at} names the sources {sorted(values)}, the first point "
                    f"{sorted(self.points[0][1])}; name the same sources in all, with weight 0 where unused."
                )
            self.points.append((at, values))

    @classmethod
    def constant(cls, weights: Mapping[str, float]) -> WeightSchedule:
        """The same weights throughout."""
        return cls([(0, weights)])

    @property
    def sources(self) -> list[str]:
        """Names of the sources."""
        return list(self.points[0][1])

    def check_sources(self, names: Sequence[str]) -> None:
        """Raises ConfigError unless the schedule names exactly ``names``."""
        if set(self.sources) != set(names):
            raise ConfigError(
                f"data.weights names the sources {sorted(self.sources)}, the corpus has {sorted(names)}; give each of "
                "them "
                "a weight, 0 where unused."
            )

    def shares(self, steps: NDArray[np.int64], *, names: Sequence[str], tokens_per_step: int) -> NDArray[np.float64]:
        """Shares at data steps, (n, K), each row adding up to 1.

        Args:
            steps: Data steps, (n,).
            names: Order of the columns.
            tokens_per_step: Tokens in a global batch.
        """
        at = np.asarray([point for point, _ in self.points], np.float64)
        table = np.asarray([[weights[name] for name in names] for _, weights in self.points], np.float64)
        # Sums and products one by one, in a fixed order: the same bits on every machine, unlike a library's sum.
        table = table / _row_sums(table)[:, None]
        where = steps.astype(np.float64) * (tokens_per_step if self.unit == "tokens" else 1)
        right = np.searchsorted(at, where, side="right")
        low, high = np.maximum(right - 1, 0), np.minimum(right, len(at) - 1)
        width = np.where(high > low, at[high] - at[low], 1.0)
        along = np.where(high > low, (where - at[low]) / width, 0.0)[:, None]
        return table[low] + (table[high] - table[low]) * along  # exact where both ends are equal

    def describe(self) -> list[list[Any]]:
        """The schedule as plain containers."""
        return [[self.unit], *([at, dict(sorted(weights.items()))] for at, weights in self.points)]


def _check_weights(weights: Mapping[str, float]) -> None:
    if not weights:
        raise ConfigError("data.weights names no source; give each source a weight.")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0.0:
            raise ConfigError(f"data.weights.{name}={weight} must be finite and at least 0.")
    if not any(weights.values()):
        raise ConfigError(f"data.weights of {', '.join(weights)} are all 0; give at least one source a weight above 0.")


def _row_sums(table: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.zeros(len(table))
    for column in table.T:
        total = total + column
    return total


class MixtureCounts:
    """Rows per source and step, so that after any step each source has had its share.

    A source's rows up to a step differ from the ideal by less than ``1 + log2(K)`` under constant weights, rounded up,
    and by a bounded number however the weights move. Sources are split in two again and again; each split carries its
    rounding error on to the next step (error diffusion), in whole numbers, so that every machine gets the same.

    Args:
        schedule: Weights.
        names: Sources, in the order of the columns.
        rows_per_step: Rows in a global batch.
        tokens_per_step: Tokens in a global batch.
    """

    def __init__(
        self, schedule: WeightSchedule, *, names: Sequence[str], rows_per_step: int, tokens_per_step: int
    ) -> None:
        if not 1 <= rows_per_step <= 2**22:
            raise ConfigError(f"global_batch_size={rows_per_step} must lie between 1 and 2^22.")
        schedule.check_sources(names)
        self._schedule, self._names = schedule, list(names)
        self._rows, self._tokens = rows_per_step, tokens_per_step
        # rows x shares of a block must stay below 2^62
        self._block = min(4096, 2**61 // (_ONE * rows_per_step))
        half = np.full(max(1, len(names) - 1), _ONE // 2, np.int64)
        self._carries = [
            (half, np.zeros(len(names), np.int64))
        ]  # rounding errors and rows so far, at each block's start
        self._lock = threading.Lock()
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def rows(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows each source gave before ``step`` and gives in it, (K,) and (K,)."""
        number, within = divmod(step, self._block)
        with self._lock:  # a prefetch thread reads ahead while the main thread may ask for shares
            if self._cached is None or self._cached[0] != number:
                for earlier in range(len(self._carries) - 1, number):
                    self._compute(earlier)
                self._cached = (number, self._compute(number))
            before = self._cached[1]
        return before[within], before[within + 1] - before[within]

    def _compute(self, number: int) -> NDArray[np.int64]:
        """Rows before each step of a block and before the next block, (block + 1, K)."""
        carry, so_far = self._carries[number]
        steps = np.arange(number * self._block, (number + 1) * self._block, dtype=np.int64)
        shares = self._schedule.shares(steps, names=self._names, tokens_per_step=self._tokens)
        counts = np.empty((self._block, len(self._names)), np.int64)
        carry = carry.copy()
        self._split(np.full(self._block, self._rows, np.int64), shares, counts, carry, 0, len(self._names))
        before = np.concatenate([so_far[None], so_far + np.cumsum(counts, axis=0)])
        if number + 1 == len(self._carries):
            self._carries.append((carry, before[-1].copy()))
        return before

    def _split(
        self,
        rows: NDArray[np.int64],
        shares: NDArray[np.float64],
        counts: NDArray[np.int64],
        carry: NDArray[np.int64],
        low: int,
        high: int,
    ) -> None:
        """Divide ``rows`` (n,) of each step over sources ``low ... high - 1``, writing ``counts`` and ``carry``."""
        if high - low == 1:
            counts[:, low] = rows
            return
        middle = (low + high) // 2
        left, total = _row_sums(shares[:, low:middle]), _row_sums(shares[:, low:high])
        fraction = np.divide(left, total, out=np.zeros_like(left), where=total > 0)
        fixed = np.minimum(np.rint(fraction * _ONE).astype(np.int64), _ONE)
        node = middle - 1  # every inner split has its own middle
        owed = np.cumsum(rows * fixed) + carry[node]
        given = owed >> _BITS
        carry[node] = owed[-1] & (_ONE - 1)
        to_left = np.diff(given, prepend=0)
        self._split(to_left, shares, counts, carry, low, middle)
        self._split(rows - to_left, shares, counts, carry, middle, high)
