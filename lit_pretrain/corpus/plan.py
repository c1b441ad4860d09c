"""Which window of which source stands in which row of which global batch: a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus.mixture import MixtureCounts, WeightSchedule
from lit_pretrain.corpus.permutation import KeyedPermutation, derive_keys, mix
from lit_pretrain.errors import ConfigError

_BLOCK = 2048  # windows whose places in the order are computed at once: one by one costs ten times as much


class SkipList:
    """Stretches of data that are never read.

    Args:
        ranges: Pairs ``[low, high)`` of data steps; they may overlap and come in any order.

    Raises:
        ConfigError: When a pair is not ``0 <= low < high``.
    """

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        merged: list[list[int]] = []
        for pair in ranges:
            is_pair = isinstance(pair, Sequence) and len(pair) == 2
            if not is_pair or any(isinstance(x, bool) or not isinstance(x, int) for x in pair):
                raise ConfigError(f"data.skip entry {pair!r} must be a pair [low, high) of whole numbers.")
            if not 0 <= pair[0] < pair[1]:
                raise ConfigError(f"data.skip entry {list(pair)} must have 0 <= low < high.")
        for low, high in sorted((int(p[0]), int(p[1])) for p in ranges):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.ranges = tuple((low, high) for low, high in merged)

    def data_step(self, update: int) -> int:
        """The data step that the ``update``-th batch read (from 0) takes its rows from."""
        step = update
        for low, high in self.ranges:
            if step < low:
                break
            step += high - low
        return step


class BatchPlan:
    """Every global batch of a run, on every rank alike, however many ranks there are.

    Within a pass over a source no window is lost or repeated, whatever the weights do; each pass has its own order.

    Args:
        windows: Source name to windows in it, at least 1 each.
        global_batch_size: Rows per batch.
        tokens_per_row: Tokens per row, for schedules over tokens.
        weights: Share of each source; None is proportional to its windows.
        seed: Decides every order.

    Raises:
        ConfigError: When sizes or weights are impossible.
    """

    def __init__(
        self,
        windows: Mapping[str, int],
        *,
        global_batch_size: int,
        tokens_per_row: int = 1,
        weights: WeightSchedule | Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        if not windows:
            raise ConfigError("The corpus has no source to train on; give it at least one.")
        for name, number in windows.items():
            if number < 1:
                raise ConfigError(f"The source {name!r} has no whole window; give it more text or leave it out.")
        if weights is None:
            weights = {name: float(number) for name, number in windows.items()}
        self.schedule = weights if isinstance(weights, WeightSchedule) else WeightSchedule.constant(weights)
        self.names = list(windows)
        self.windows = np.asarray(list(windows.values()), np.int64)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._tokens_per_step = global_batch_size * tokens_per_row
        self._counts = MixtureCounts(
            self.schedule,
            names=self.names,
            rows_per_step=global_batch_size,
            tokens_per_step=self._tokens_per_step,
        )
        self._latest: dict[int, tuple[tuple[int, int] | None, NDArray[np.int64]]] = {}

    def shares(self, data_step: int) -> dict[str, float]:
        """Share of each source at ``data_step``."""
        row = self.schedule.shares(
            np.asarray([data_step], np.int64), names=self.names, tokens_per_step=self._tokens_per_step
        )[0]
        return dict(zip(self.names, row.tolist(), strict=True))

    def epochs(self, data_step: int) -> dict[str, float]:
        """Passes over each source that were begun or finished before ``data_step``, as a number with a fraction."""
        before, _ = self._counts.rows(data_step)
        return dict(zip(self.names, (before / self.windows).tolist(), strict=True))

    def rows(self, data_step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source index and window index of each row, (G,) and (G,).

        Rows are shuffled, so that any slice of the batch is a mixture.
        """
        before, now = self._counts.rows(data_step)
        source = np.repeat(np.arange(len(self.names)), now)
        window = np.concatenate([self._windows_of(k, int(before[k]), int(now[k])) for k in range(len(self.names))])
        key = derive_keys(self.seed, "batch", data_step, count=1)[0]
        order = np.argsort(mix(mix(np.arange(self.global_batch_size, dtype=np.uint64)) + key), kind="stable")
        return source[order], window[order]

    def _windows_of(self, source: int, first: int, number: int) -> NDArray[np.int64]:
        """Windows number ``first ... first + number - 1`` that ``source`` gives over the whole run."""
        size = int(self.windows[source])
        parts = []
        while number > 0:
            epoch, within = divmod(first, size)
            block, at = divmod(within, _BLOCK)
            part = self._ordered(source, epoch, block)[at : at + number]
            parts.append(part)
            first, number = first + part.size, number - part.size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _ordered(self, source: int, epoch: int, block: int) -> NDArray[np.int64]:
        """Part of a pass over a source in its order, up to ``_BLOCK`` windows; the last part asked for is kept."""
        known, windows = self._latest.get(source, (None, np.empty(0, np.int64)))
        if known != (epoch, block):
            size = int(self.windows[source])
            keys = derive_keys(self.seed, "source", self.names[source], epoch, count=KeyedPermutation.num_keys)
            order = KeyedPermutation(size, keys=keys)
            windows = order(np.arange(block * _BLOCK, min(size, (block + 1) * _BLOCK)))
            self._latest[source] = ((epoch, block), windows)
        return windows
