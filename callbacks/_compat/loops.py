"""Lightning's loops: where training stands, how a checkpoint says it, and how a restart is led there.

Everything here is private in Lightning 2.6 and has no public counterpart. What its own restart does instead: a save at
the end of a batch loses the epoch's end or trains a batch too many at it, one in the middle of an accumulation window
loses gradients in silence, one before a validation loses that validation. Can go when restarts are exact upstream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage as EvaluationRestart


class Epoch(StrEnum):
    """How far the epoch has come."""

    RUNNING = "running"
    ENDING = "ending"  # all its batches are read; its end is still to be announced
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where training stands between two updates. Pairs are (over the whole run, in this epoch).

    Args:
        batches: Microbatches read.
        steps: Optimizer steps.
        zero_grads: Times the gradients were cleared.
        schedules: Steps of learning-rate schedulers.
        windows: Accumulation windows closed, applied or not: the step under which the next one is logged.
    """

    batches: tuple[int, int]
    steps: tuple[int, int]
    zero_grads: tuple[int, int]
    schedules: tuple[int, int]
    windows: int


def place(trainer: Trainer, *, unread: int = 0, windows: int | None = None) -> Place:
    """The place between two updates.

    Args:
        trainer: In any hook of training.
        unread: 1 when a batch has been fetched that is not to count.
        windows: Closed windows, where they differ from Lightning's count (which lags until after validation).
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batches, optimizer = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer
    steps, zero_grad = optimizer.step, optimizer.zero_grad
    if trainer.lightning_module is not None and not trainer.lightning_module.automatic_optimization:
        steps = loop.manual_optimization.optim_step_progress
    return Place(
        batches=(batches.total.ready - unread, batches.current.ready - unread),
        steps=(steps.total.ready, steps.current.ready),
        zero_grads=(zero_grad.total.ready, zero_grad.current.ready),
        schedules=(loop.scheduler_progress.total.ready, loop.scheduler_progress.current.ready),
        windows=loop._batches_that_stepped if windows is None else windows,
    )


def set_accumulation(trainer: Trainer, number: int) -> None:
    """Microbatches of the windows from here on: the loops read it anew at each batch."""
    trainer.accumulate_grad_batches = number


def windows_closed(trainer: Trainer) -> int:
    """Lightning's count of closed accumulation windows; the one in progress is added after validation."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def has_begun(trainer: Trainer) -> bool:
    """Whether an epoch has been started, in this process or before."""
    return trainer.fit_loop.epoch_progress.total.ready > 0


def epoch(trainer: Trainer, *, fresh: bool) -> Epoch:
    """How far the epoch has come.

    Args:
        trainer: Between two updates.
        fresh: It has begun and read no batch; Lightning clears the counts of the one before a little later.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current
    if fresh or not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        return Epoch.RUNNING  # also when the run stops in the middle of it: a longer run goes on there
    return Epoch.ENDED if progress.processed == progress.ready else Epoch.ENDING


def write_place(loops: MutableMapping[str, Any], at: Place, *, epoch: Epoch, fresh: bool) -> None:
    """Make a checkpoint's loops say exactly: this many updates are done, and nothing is under way.

    Args:
        loops: ``checkpoint["loops"]["fit_loop"]``; changed in place.
        at: What to say.
        epoch: The state of the epoch.
        fresh: See :func:`epoch`.
    """
    ended = epoch is Epoch.ENDED
    current = 0 if ended or fresh else 1  # the next epoch counts its own

    def say(tracker: str, pair: tuple[int, int]) -> None:
        progress = loops[tracker]
        progress["total"] = dict.fromkeys(progress["total"], pair[0])
        progress["current"] = dict.fromkeys(progress["current"], pair[1] * current)

    say("epoch_loop.batch_progress", at.batches)
    loops["epoch_loop.batch_progress"]["is_last_batch"] = epoch is Epoch.ENDING
    say("epoch_loop.scheduler_progress", at.schedules)
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
    for progress, pair in ((optimizer["step"], at.steps), (optimizer["zero_grad"], at.zero_grads)):
        progress["total"] = dict.fromkeys(progress["total"], pair[0])
        progress["current"] = dict.fromkeys(progress["current"], pair[1] * current)
    if manual["total"]["completed"]:  # manual optimization counts there, and only there
        manual["total"] = dict.fromkeys(manual["total"], at.steps[0])
        manual["current"] = dict.fromkeys(manual["current"], at.steps[1] * current)
        optimizer["step"]["total"] = dict.fromkeys(optimizer["step"]["total"], 0)
        optimizer["step"]["current"] = dict.fromkeys(optimizer["step"]["current"], 0)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = at.windows
    for tracker in loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]:
        begun = tracker["ready"]
        tracker.update(started=begun, processed=begun - (not ended), completed=begun - (not ended))
    if ended:
        # A loader that was saved at its end gives nothing when it is loaded: the next epoch starts afresh.
        loops["state_dict"].pop("combined_loader", None)


def lead_restart(trainer: Trainer, *, windows: int, owes_validation: bool, ending: bool) -> None:
    """Set Lightning's loops so that the next thing that happens is what would have happened. In ``on_train_start``.

    Args:
        trainer: With restored loops.
        windows: Accumulation windows closed.
        owes_validation: The validation after the last update has not finished.
        ending: The end of the epoch has not been announced.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    validation = loop.val_loop
    # While it is owed, Lightning's count lags by one: validation logs under the step of the update before it.
    loop._batches_that_stepped = windows - 1 if owes_validation else windows
    validation.batch_progress.reset()
    validation._restart_stage = (
        EvaluationRestart.RESTARTED_MID_EVALUATION if owes_validation else EvaluationRestart.NONE
    )
    # At the epoch's end Lightning leaves the loop only if it believes that validation has run; else it trains on.
    validation._has_run = ending and not owes_validation


def set_windows_closed(trainer: Trainer, windows: int) -> None:
    """Correct Lightning's count after a restart, at the start of a batch."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = windows


def end_restart(trainer: Trainer) -> None:
    """Tell the loops that they are no longer restarting, where an epoch's end was all that was left of it."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.on_iteration_done()
    loop.val_loop.on_iteration_done()
    trainer.fit_loop._restarting = False


def end_epoch_as_ever(trainer: Trainer) -> None:
    """In ``on_train_epoch_end``: Lightning steps schedulers that watch a metric next, but not in a restarted epoch.

    It has saved no metrics to show them; ``ExactResume`` has.
    """
    trainer.fit_loop._restarting = False


def validation_is_due(trainer: Trainer) -> bool:
    """Whether a validation follows the batch in progress."""
    loop: Any = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or not trainer.enable_validation or not sum(trainer.num_val_batches or [0]):
        return False
    return bool(loop._should_check_val_fx(fetcher))


def epoch_is_over(trainer: Trainer) -> bool:
    """Whether the batch in progress is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def run_is_over(trainer: Trainer) -> bool:
    """Whether the batch in progress is the last of the run, as far as the loops know."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    if steps != -1 and trainer.global_step >= steps:
        return True
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return True
    return epochs not in (None, -1) and epoch_is_over(trainer) and trainer.current_epoch + 1 >= (epochs or 0)


def lift_minimum(trainer: Trainer) -> tuple[int | None, int | None]:
    """Let a stop be one before ``min_epochs`` and ``min_steps`` are reached; gives what they were."""
    loop = trainer.fit_loop
    minimum = loop.min_epochs, loop.epoch_loop.min_steps
    loop.min_epochs, loop.epoch_loop.min_steps = None, None
    return minimum


def set_minimum(trainer: Trainer, minimum: tuple[int | None, int | None]) -> None:
    """Put back those that ``lift_minimum`` found."""
    loop = trainer.fit_loop
    loop.min_epochs = minimum[0] or loop.min_epochs
    loop.epoch_loop.min_steps = minimum[1] or loop.epoch_loop.min_steps


def note_saved(trainer: Trainer) -> None:
    """Tell every ModelCheckpoint that this update is saved: its state does not say so, and it would save again."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


# Loaders


def train_loaders(trainer: Trainer) -> list[Any]:
    """The loaders of training."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def is_stateful(loader: object) -> bool:
    """Whether Lightning takes the loader for one that keeps its own place."""
    return isinstance(loader, _Stateful)


def loader_states(trainer: Trainer) -> list[Any]:
    """What Lightning would save of the loaders now."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def set_loader_states(loops: Mapping[str, Any], states: list[Any]) -> None:
    """Replace the loaders' states in ``checkpoint["loops"]["fit_loop"]``, if it holds any."""
    if "combined_loader" in loops["state_dict"]:
        loops["state_dict"]["combined_loader"] = states


def knows_its_length(trainer: Trainer) -> bool:
    """Whether the loaders have a length; of others Lightning reads one batch ahead."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is not None


def reopen(trainer: Trainer, *, epoch: int | None = None) -> Iterator[Any]:
    """Start an epoch's iterator anew, as Lightning does at each epoch's start, and give access to its batches.

    Args:
        trainer: With its loaders made.
        epoch: Told to samplers; None for the one that is running.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    progress: Any = trainer.fit_loop.epoch_progress.current
    for loader in train_loaders(trainer):
        _set_sampler_epoch(loader, progress.processed if epoch is None else epoch)
    return iter(fetcher)


def forget_fetched(trainer: Trainer) -> None:
    """Undo the count of batches that were read again; Lightning adds those of the epoch itself."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched = 0


def batches_ready(trainer: Trainer) -> int:
    """Microbatches begun over the whole run, the one in progress included."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
