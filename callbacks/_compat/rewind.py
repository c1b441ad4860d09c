"""Lightning's loops under a rollback: the weights' clock goes back, the data's never does.

Private in Lightning 2.6, without a public counterpart: its counters, its collection of logged values, the fetcher that
training takes batches from. Can go when the trainer can be set back to an earlier update itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric

from lit_pretrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WeightClock:
    """What Lightning counts of the weights, over the whole run.

    Args:
        steps: Optimizer steps.
        zero_grads: Times the gradients were cleared.
        schedules: Steps of learning-rate schedulers.
        manual_steps: Optimizer steps under manual optimization.
        windows: Accumulation windows closed: the step under which the next one is logged.
    """

    steps: int
    zero_grads: int
    schedules: int
    manual_steps: int
    windows: int


def _trackers(trainer: Trainer) -> list[Any]:
    loop: Any = trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    return [optimizer.step, optimizer.zero_grad, loop.scheduler_progress, loop.manual_optimization.optim_step_progress]


def read_clock(trainer: Trainer) -> WeightClock:
    """The clock between two updates."""
    steps, zero_grads, schedules, manual = (tracker.total.ready for tracker in _trackers(trainer))
    return WeightClock(
        steps=steps,
        zero_grads=zero_grads,
        schedules=schedules,
        manual_steps=manual,
        windows=int(trainer.fit_loop.epoch_loop._batches_that_stepped),
    )


def set_clock(trainer: Trainer, clock: WeightClock) -> None:
    """Set all but ``windows``, which Lightning still needs until the batch in progress is logged."""
    wanted = (clock.steps, clock.zero_grads, clock.schedules, clock.manual_steps)
    for tracker, value in zip(_trackers(trainer), wanted, strict=True):
        taken_back = tracker.total.ready - value
        for counts in (tracker.total, tracker.current):
            for name in vars(counts):
                setattr(counts, name, max(0, getattr(counts, name) - taken_back))


def skip_next_validation(trainer: Trainer) -> None:
    """No validation after the batch in progress."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def forget_saves_after(trainer: Trainer, step: int) -> None:
    """Let every ModelCheckpoint save a later step again: what it wrote there is of updates that were taken back."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._last_global_step_saved > step:
            callback._last_global_step_saved = -1


def saves_every(callback: ModelCheckpoint) -> int:
    """After how many steps it saves; 0 where it does not count them."""
    return int(callback._every_n_train_steps)


# Values logged over an epoch


@dataclass(frozen=True)
class LoggedValues:
    """Sums of what is logged as a mean over the epoch.

    Args:
        epoch: In which they were taken.
        states: By key: what each collected; its tensors are replaced, never changed.
    """

    epoch: int
    states: dict[str, dict[str, Any]]


def logged_values(trainer: Trainer) -> LoggedValues:
    """Of the running epoch."""
    results: Any = trainer.fit_loop.epoch_loop._results
    return LoggedValues(
        epoch=trainer.current_epoch,
        states={
            key: {**entry.metric_state, "_update_count": entry._update_count, "has_reset": entry.has_reset}
            for key, entry in results.items()
            if _is_epoch_mean(entry)
        },
    )


def restore_logged_values(trainer: Trainer, values: LoggedValues) -> None:
    """Take back what was added since; of another epoch, everything: its own beginning is unknown."""
    results: Any = trainer.fit_loop.epoch_loop._results
    for key, entry in results.items():
        if not _is_epoch_mean(entry):
            continue
        entry.reset()
        entry.has_reset = True
        for name, value in values.states.get(key, {}).items() if values.epoch == trainer.current_epoch else ():
            setattr(entry, name, value)
        entry._computed = None


def _is_epoch_mean(entry: Any) -> bool:
    return isinstance(entry, _ResultMetric) and entry.is_tensor and entry.meta.on_epoch


def metric_states(module: Any) -> dict[str, dict[str, Any]]:
    """What the torchmetrics of a module have collected."""
    return {name: _copied(part.metric_state) for name, part in module.named_modules() if isinstance(part, Metric)}


def restore_metric_states(module: Any, states: dict[str, dict[str, Any]]) -> None:
    """Put back what ``metric_states`` gave."""
    for name, part in module.named_modules():
        if isinstance(part, Metric) and name in states:
            for key, value in _copied(states[name]).items():
                setattr(part, key, value)
            part._computed = None


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) else v.detach().clone() for k, v in state.items()}


# Batches


class FetchListener(Protocol):
    """Is asked before training takes a batch, and told after."""

    def leaves_out(self) -> bool:
        """Whether the next microbatch is to be read and forgotten."""
        ...

    def left_out(self, batch: Any) -> None:
        """Such a microbatch was read; Lightning's counts hold it."""
        ...

    def left_out_to_the_end(self) -> None:
        """The epoch is over, and its last microbatch was left out."""
        ...

    def fetched(self) -> None:
        """A microbatch that will be trained on was read; no hook has seen it."""
        ...

    def before_iterator(self) -> None:
        """An epoch's iterator is made next."""
        ...

    def before_order(self) -> None:
        """An epoch's first microbatch is read next."""
        ...

    def order_is_drawn(self) -> None:
        """That has happened, one or the other."""
        ...


def takes_batches_itself(trainer: Trainer) -> bool:
    """Whether ``training_step`` is given the loader's iterator in place of a batch."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def listen_to_fetches(trainer: Trainer, listener: FetchListener) -> None:
    """Tell of every batch that training takes; call it at the start of every epoch.

    The fetcher's class is replaced by a subclass of it: Python looks ``__next__`` up on the class. Lightning counts a
    batch that is left out as one that was trained on.

    Args:
        trainer: With its loaders made.
        listener: Told.

    Raises:
        ConfigError: The module takes the loader's iterator itself.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if takes_batches_itself(trainer):
        raise ConfigError(
            "training_step(dataloader_iter) takes batches by itself, and LossSpikeRollback could not skip any; let "
            "training_step take a batch, or use mode=warn."
        )
    kind: Any = type(fetcher)
    if fetcher is None or hasattr(kind, "listens"):
        return
    loop: Any = trainer.fit_loop.epoch_loop

    def new_iterator(self: Any) -> Any:
        listener.before_iterator()
        kind.__iter__(self)
        listener.order_is_drawn()
        return self

    def read(self: Any) -> Any:
        if self.fetched:
            return kind.__next__(self)
        listener.before_order()
        found = kind.__next__(self)
        listener.order_is_drawn()
        return found

    def next_batch(self: Any) -> Any:
        while listener.leaves_out():
            batch, _, _ = self.read()
            for counts in (loop.batch_progress.total, loop.batch_progress.current):
                for name in vars(counts):
                    setattr(counts, name, getattr(counts, name) + 1)
            loop.batch_progress.is_last_batch = self.done
            listener.left_out(batch)
            if loop._num_ready_batches_reached():
                listener.left_out_to_the_end()
                raise StopIteration  # what is left of it is left out of the next epoch
        found = self.read()
        listener.fetched()
        return found

    methods = {"__iter__": new_iterator, "__next__": next_batch, "read": read, "listens": True}
    fetcher.__class__ = type(kind.__name__, (kind,), methods)


def stop_listening(trainer: Trainer) -> None:
    """Give the fetcher its own class back."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and hasattr(type(fetcher), "listens"):
        fetcher.__class__ = type(fetcher).__bases__[0]
