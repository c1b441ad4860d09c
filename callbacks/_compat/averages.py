"""Lightning's averages of weights, which no public name gives access to (lightning 2.6).

Can go when ``WeightAveraging`` can be set back to an earlier update itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

Counts = list[tuple[int, int]]  # of each average: the last step and the last epoch that it has taken in


def averaging(trainer: Trainer) -> list[WeightAveraging]:
    """The callbacks that average weights."""
    return [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]


def tensors(trainer: Trainer) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """All averages, each under a key; empty before ``setup`` has made them."""
    for i, callback in enumerate(averaging(trainer)):
        model: Any = callback._average_model
        if model is not None:
            for pairs in (model.named_parameters(), model.named_buffers()):
                for name, tensor in pairs:
                    yield ("average", i, name), tensor


def counts(trainer: Trainer) -> Counts:
    """How far the averages have come."""
    return [(c._latest_update_step, c._latest_update_epoch) for c in averaging(trainer)]


def set_counts(trainer: Trainer, counts: Counts) -> None:
    """Put back what ``counts`` gave."""
    for callback, (step, epoch) in zip(averaging(trainer), counts, strict=True):
        callback._latest_update_step, callback._latest_update_epoch = step, epoch


def take_in_epoch(trainer: Trainer, epoch: int) -> None:
    """Do what averages do at the end of ``epoch``, which has passed: some take the weights in then."""
    for callback in averaging(trainer):
        model: Any = callback._average_model
        if model is not None and epoch > callback._latest_update_epoch and callback.should_update(epoch_idx=epoch):
            model.update_parameters(trainer.lightning_module)
            callback._latest_update_epoch = epoch
