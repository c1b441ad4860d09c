"""Held-out windows, each exactly once, over any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus import Windows, derive_keys, mix


def validation_rows(
    sources: Sequence[Windows | None], *, max_windows: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and window of every held-out row, (N,) and (N,), in one fixed mixed order.

    The order mixes the sources, so that the first few batches are a fair sample of all.

    Args:
        sources: Held-out windows per source; None for a source without.
        max_windows: At most so many rows: every source gives its proportional part (one at least), in its order.
    """
    sizes = np.asarray([0 if windows is None else len(windows) for windows in sources], np.int64)
    total = int(sizes.sum())
    if max_windows is not None and total > max_windows:
        sizes = np.where(sizes > 0, np.maximum(1, sizes * max_windows // total), 0)
    pairs = []
    for number, (windows, take) in enumerate(zip(sources, sizes.tolist(), strict=True)):
        if windows is not None and take:
            # evenly spread over the source: its documents come in the order of their files
            window = np.arange(take, dtype=np.int64) * len(windows) // take
            pairs.append(np.stack([np.full(take, number), window], axis=1))
    rows = np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)
    key = derive_keys("validation", count=1)[0]
    order = np.argsort(mix(np.arange(len(rows), dtype=np.uint64) ^ key), kind="stable")
    return rows[order, 0], rows[order, 1]


def shard_rows(
    source: NDArray[np.int64], window: NDArray[np.int64], *, rank: int, world_size: int, micro_batch_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """This rank's rows as batches, (n, B) and (n, B): every rank gets the same n, filled up with source -1.

    Args:
        source: Source of each row, (N,).
        window: Window of each row, (N,).
        rank: Data-parallel rank.
        world_size: Data-parallel ranks.
        micro_batch_size: B.
    """
    batches = -(-source.size // (world_size * micro_batch_size))
    fill = batches * world_size * micro_batch_size - source.size
    shape = (batches, world_size, micro_batch_size)
    padded = np.concatenate([source, np.full(fill, -1, np.int64)]).reshape(shape)
    return padded[:, rank], np.concatenate([window, np.zeros(fill, np.int64)]).reshape(shape)[:, rank]
