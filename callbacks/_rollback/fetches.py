"""Between two batches: what is left out, and the random numbers that the next one begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lit_pretrain.callbacks import _compat, _random
from lit_pretrain.callbacks._compat import averages, epochs, loops, rewind
from lit_pretrain.callbacks._rollback.data_course import DataCourse
from lit_pretrain.callbacks.counters import RunCounters
from lit_pretrain.callbacks.exact_resume import ExactResume


class Fetches:
    """Reads data that are left out so that nothing but the order of an epoch is drawn for them.

    After a jump the run has the random state that it had before the data that are left out, moved on by what a loader
    draws for the order of every epoch that began meanwhile: as if a loop had read those data and done nothing with
    them. So no order comes a second time, and a run that is killed and makes the jump again makes the same one.

    Args:
        trainer: In training.
        course: Of the data.
        fetched: Called before any hook of a batch that is trained on.
        only_warns: Nothing has to be left out where batches are out of reach.
    """

    def __init__(
        self, trainer: Trainer, course: DataCourse, *, fetched: Callable[[], None], only_warns: bool = False
    ) -> None:
        self._only_warns = only_warns
        self._trainer, self._course, self._tell = trainer, course, fetched
        self._owed: _random.State | None = None  # for the next window; None where numbers are drawn as ever
        self._end_is_left_out = False  # of this epoch, so that no validation stands there
        self._held: list[Callable[[], None]] = []  # schedulers that watch a metric

    def listen(self) -> None:
        """To this epoch's batches; the loaders may be others than those of the last."""
        if not (self._only_warns and rewind.takes_batches_itself(self._trainer)):
            rewind.listen_to_fetches(self._trainer, self)

    def epoch_ends(self) -> None:
        """Before schedulers step that watch a metric."""
        if self._end_is_left_out:
            self._held.append(epochs.hold_plateaus(self._trainer, "epoch"))

    def epoch_has_ended(self) -> None:
        """After it; also where the run ends with it."""
        self._end_is_left_out = False
        self._release()

    def owe(self, random: _random.State) -> None:
        """The next window begins with this state, whatever is drawn until then."""
        self._owed = random

    def went_back(self, *, epoch: int) -> None:
        """The weights are those of an earlier update, whose random state is owed; all that was read stays read.

        The ends of epochs in between, and of this one if it is over, have happened: schedules that step by epochs step
        again. A ``DataLoader`` gives this epoch another order, the one that it draws from the random state that is
        left, and is read up to the place; a loader that keeps its own place goes on as it is.

        Args:
            epoch: Of that update.
        """
        now = self._trainer.current_epoch
        over = loops.epoch_is_over(self._trainer)
        self._end_is_left_out = over
        self._held.append(epochs.hold_plateaus(self._trainer, "step"))
        for ended in range(epoch, now + over):
            epochs.step_schedulers(self._trainer, epoch=ended)
            if ended == now:
                break  # the hooks of its end are still to come
            averages.take_in_epoch(self._trainer, ended)
            if epochs.draws_orders(self._trainer):
                epochs.begin_again(self._trainer, epoch=ended + 1, is_current=ended + 1 == now)
        self._restore()  # what is saved now goes on with it

    # What the fetcher asks and tells.

    def leaves_out(self) -> bool:
        """Whether the next microbatch is."""
        self._release()
        return self._course.leaves_out()

    def left_out(self, batch: Any) -> None:
        """A microbatch was read and is forgotten."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunCounters):
                callback.leave_out(self._trainer, batch)
        if self._owed is None:
            resume = self._resume()
            self._owed = (None if resume is None else resume.random_owed) or _random.capture()
        self._course.left_out(window_goes_on=_compat.accumulates(self._trainer))

    def left_out_to_the_end(self) -> None:
        """The last batch of the epoch was left out: Lightning steps schedules behind one that was trained on."""
        self._end_is_left_out = True
        epochs.step_schedulers(self._trainer, epoch=self._trainer.current_epoch)

    def fetched(self) -> None:
        """Before any hook of the next batch."""
        self._restore()
        self._owed = None
        self._tell()

    def before_iterator(self) -> None:
        """An epoch's iterator is made next, and draws."""
        resume = self._resume()
        if self._owed is not None:
            self._restore()
            if resume is not None:
                resume.note_iterator()

    def before_order(self) -> None:
        """An epoch's first batch is read next, and a sampler draws."""
        self._restore()

    def order_is_drawn(self) -> None:
        """What was drawn stays drawn."""
        if self._owed is not None:
            self._owed = _random.capture()

    def _release(self) -> None:
        while self._held:
            self._held.pop()()

    def _restore(self) -> None:
        if self._owed is not None:
            _random.restore(self._owed)

    def _resume(self) -> ExactResume | None:
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return next((c for c in callbacks if isinstance(c, ExactResume)), None)
