"""Loaders that cannot say where they are: read again up to the place, under the random state of the epoch's start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset

from lit_pretrain.callbacks import _random
from lit_pretrain.callbacks._compat import loops


class EpochReplay:
    """The random states from which an epoch's order of data came.

    A ``DataLoader`` draws from torch's global generator twice: when its iterator is made (seeds of its workers) and
    when its sampler gives the first index (the order). In the first epoch of a run, hooks stand between the two.
    """

    def __init__(self) -> None:
        self._iterator: _random.State = {}
        self._first_batch: _random.State | None = None
        self._first_epoch = True

    def before_iterator(self) -> None:
        """Note the state before the run's first iterator is made."""
        self._iterator, self._first_epoch = _random.capture(), True

    def epoch_starts(self, trainer: Trainer) -> None:
        """Note the state at an epoch's start; the iterators of later epochs are made right after it."""
        if not _needs_replay(trainer):
            return
        if self._first_epoch:
            self._first_batch, self._first_epoch = _random.capture(), False
        else:
            self._iterator, self._first_batch = _random.capture(), None

    def iterator_starts(self) -> None:
        """Note the state before an epoch's iterator is made, where it is another than at the epoch's start."""
        self._iterator, self._first_batch = _random.capture(), None

    def next_iterator_follows_epoch_start(self) -> None:
        """A resumed run makes every iterator that counts right after an epoch's start."""
        self._first_epoch = False

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Empty where every loader keeps its own place."""
        if not _needs_replay(trainer):
            return {}
        return {"iterator": self._iterator, "first_batch": self._first_batch}

    def resume(self, trainer: Trainer, saved: Sequence[dict[str, Any]], *, same_ranks: bool, wanted: bool) -> None:
        """Bring the loaders to their place in the epoch, or say why that cannot be done.

        Args:
            trainer: In ``on_train_start``, with restored loops.
            saved: What ``state_dict`` gave on every rank.
            same_ranks: As many ranks as when the checkpoint was saved.
            wanted: Whether the user wants the data to be read again.
        """
        if not _needs_replay(trainer):
            if not loops.knows_its_length(trainer):
                rank_zero_warn(
                    "The training data keep their own place but have no length: Lightning had read one batch ahead "
                    "when it saved, and that batch is lost. Give the loader a __len__ for an exact resume."
                )
            return
        batches = loops.place(trainer).batches[1]
        problem = None
        if not wanted:
            problem = "ExactResume(replay=False) leaves it at that"
        elif not same_ranks:
            problem = "the number of ranks has changed, and so has every rank's share of the data"
        elif any(loops.is_stateful(loader) for loader in loops.train_loaders(trainer)):
            problem = "others of the loaders have one"
        elif trainer.global_rank >= len(saved) or not saved[trainer.global_rank]:
            problem = "the checkpoint does not say how the epoch began"
        if problem is not None:
            if batches:
                rank_zero_warn(
                    f"The training data begin the epoch anew, though {batches} of its batches were read: the loader "
                    f"has no state_dict, and {problem}."
                )
            return
        self._read_again(trainer, saved[trainer.global_rank], batches)

    def _read_again(self, trainer: Trainer, began: dict[str, Any], batches: int) -> None:
        if any(isinstance(getattr(x, "dataset", None), IterableDataset) for x in loops.train_loaders(trainer)):
            rank_zero_warn(
                "An IterableDataset is read again to find the place: the resume is exact only if it gives the same "
                "samples in the same order."
            )
        if batches:
            rank_zero_info(f"Reading {batches} batches of the epoch again to find the place.")
        self._iterator, self._first_batch = began["iterator"], began["first_batch"]
        _random.restore(self._iterator)
        iterator = loops.reopen(trainer)
        if self._first_batch is not None:
            _random.restore(self._first_batch)
        for _ in range(batches):
            next(iterator)
        loops.forget_fetched(trainer)


def _needs_replay(trainer: Trainer) -> bool:
    return any(not loops.is_stateful(loader) for loader in loops.train_loaders(trainer))
