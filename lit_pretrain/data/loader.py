"""An iterable of batches that Lightning takes as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lit_pretrain.data.prefetch import prefetch

Batch = dict[str, Any]


class PlanLoader:
    """The batches of one epoch, from wherever training stands.

    It is not a ``DataLoader``, so that Lightning neither shuffles it nor wraps its sampler, and asks for no workers.
    Stateful in Lightning's eyes but without a state: the position is the trainer's own count of processed batches.

    Args:
        read: Gives the batch at an absolute position. Runs in the prefetch thread.
        num_batches: Batches in one epoch.
        start: Gives the position of the first batch, asked when the first batch is: an iterator may be made before a
            checkpoint's counters are restored.
        depth: Batches made ahead; 0 for none.
        pin_memory: Put batches into page-locked memory, from where they are copied to a GPU in the background.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        *,
        num_batches: int,
        start: Callable[[], int] = lambda: 0,
        depth: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._read, self._start = read, start
        self._num_batches, self._depth, self._pin_memory = num_batches, depth, pin_memory

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        start = self._start()
        yield from prefetch(self._make, range(start, start + self._num_batches), depth=self._depth)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see the class."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see the class."""

    def _make(self, position: int) -> Batch:
        batch = self._read(position)
        if self._pin_memory:
            return {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        return batch
