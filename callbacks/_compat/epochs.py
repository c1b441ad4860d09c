"""Lightning's ends and beginnings of epochs that have happened, after the weights went back behind them.

Private in Lightning 2.6, without a public counterpart. Can go when the trainer can be set back to an earlier update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lit_pretrain.callbacks._compat import loops


def step_schedulers(trainer: Trainer, *, epoch: int) -> None:
    """Step the schedulers that step by epochs, as the end of ``epoch`` does; not those that watch a metric.

    What they would have seen is not known: ``ReduceLROnPlateau`` keeps the state that it has.
    """
    if not trainer.lightning_module.automatic_optimization:
        return  # the module's own business
    progress: Any = trainer.fit_loop.epoch_loop.scheduler_progress
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch" and not config.reduce_on_plateau and (epoch + 1) % config.frequency == 0:
            progress.increment_ready()
            trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
            progress.increment_completed()


def hold_plateaus(trainer: Trainer, interval: Literal["step", "epoch"]) -> Callable[[], None]:
    """Keep schedulers that watch a metric from stepping; call what comes back when they may again.

    By steps, Lightning would show them the loss of an update that was taken back: they step after every hook of its
    batch. By epochs, a value of long ago, since the validation was left out, or it would end the run for want of one.
    """
    held = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == interval]
    for config in held:
        config.interval = "held"

    def release() -> None:
        for config in held:
            config.interval = interval

    return release


def draws_orders(trainer: Trainer) -> bool:
    """Whether every training loader is one whose order of an epoch comes from the random state at its beginning."""
    return all(isinstance(x, DataLoader) or not loops.is_stateful(x) for x in loops.train_loaders(trainer))


def begin_again(trainer: Trainer, *, epoch: int, is_current: bool) -> None:
    """Let the loaders begin ``epoch`` from the random state of now.

    Args:
        trainer: Between two batches, its fetcher listened to.
        epoch: This one, or one before it.
        is_current: Read on to where training stands; else only what draws the order is read.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if is_current and any(
        isinstance(getattr(x, "dataset", None), IterableDataset) for x in loops.train_loaders(trainer)
    ):
        rank_zero_warn(
            "An IterableDataset begins its epoch again after a rollback over the epoch's start: batches are left out, "
            "or come twice, unless it gives the same samples in the same order."
        )
    loops.reopen(trainer, epoch=epoch)
    for _ in range(trainer.fit_loop.epoch_loop.batch_progress.current.ready if is_current else 1):
        fetcher.read()  # of `rewind.listen_to_fetches`: leaves nothing out
