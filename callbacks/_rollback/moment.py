"""A snapshot and everything around it that has to go back with it: clocks, logged means, other callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lit_pretrain.callbacks._compat import averages, rewind
from lit_pretrain.callbacks._compat.rewind import LoggedValues, WeightClock
from lit_pretrain.callbacks._rollback.snapshot import Copier, Snapshot
from lit_pretrain.callbacks.counters import RunCounters
from lit_pretrain.callbacks.exact_resume import ExactResume
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.callbacks.non_finite import NonFiniteGuard
from lit_pretrain.spikes import SnapshotPoint


@dataclass
class Moment:
    """The run between two updates.

    Args:
        snapshot: This rank's tensors and random state.
        point: Where it is.
        detector: Of spikes, plain.
        is_confirmed: The loss that its weights gave was accepted.
    """

    snapshot: Snapshot
    point: SnapshotPoint
    detector: Mapping[str, Any]
    is_confirmed: bool = False
    clock: WeightClock = field(init=False)
    _logged: LoggedValues = field(init=False)
    _metrics: dict[str, dict[str, Any]] = field(init=False)
    _callbacks: dict[str, Any] = field(init=False)
    _averages: averages.Counts = field(init=False)
    _learning_rate: tuple[int, int] | None = None
    _counters: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self._callbacks = {}

    @classmethod
    def of(cls, trainer: Trainer, snapshot: Snapshot, *, point: SnapshotPoint, detector: Mapping[str, Any]) -> Moment:
        """This moment, with a snapshot of it."""
        moment = cls(snapshot, point, detector)
        moment.clock = rewind.read_clock(trainer)
        moment._logged = rewind.logged_values(trainer)
        moment._averages = averages.counts(trainer)
        moment._metrics = rewind.metric_states(trainer.lightning_module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateSchedule):
                moment._learning_rate = callback.applied_updates, callback.applied_tokens
            elif isinstance(callback, RunCounters):
                moment._counters = callback.updates, callback.tokens
            elif _rolls_back(callback):
                moment._callbacks[callback.state_key] = deepcopy(callback.state_dict())
        return moment

    @property
    def epoch(self) -> int:
        """In which it was taken."""
        return self._logged.epoch

    def restore(self, trainer: Trainer, copier: Copier) -> None:
        """Go back to it. Call it at the end of an update's last batch, on every rank.

        Lightning's count of closed windows is set later, before the next batch: until then it belongs to the batch in
        progress.
        """
        self.snapshot.restore(trainer, copier)
        rewind.set_clock(trainer, self.clock)
        rewind.restore_logged_values(trainer, self._logged)
        rewind.restore_metric_states(trainer.lightning_module, self._metrics)
        averages.set_counts(trainer, self._averages)
        rewind.skip_next_validation(trainer)
        rewind.forget_saves_after(trainer, trainer.global_step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateSchedule) and self._learning_rate is not None:
                updates, tokens = self._learning_rate
                callback.rewind(applied_updates=updates, applied_tokens=tokens)
            elif isinstance(callback, RunCounters) and self._counters is not None:
                callback.rewind(updates=self._counters[0], tokens=self._counters[1])
            elif callback.state_key in self._callbacks:
                callback.load_state_dict(deepcopy(self._callbacks[callback.state_key]))
            if isinstance(callback, NonFiniteGuard):
                callback.went_back(trainer)
            if isinstance(callback, ExactResume):
                callback.rewind(windows=self.clock.windows)


def _rolls_back(callback: Callback) -> bool:
    """Whether a callback's state is part of what the weights decide; one of the user's says so itself."""
    return isinstance(callback, EarlyStopping) or bool(getattr(callback, "rolls_back", False))
