"""Figures of callbacks in the very row that Lightning writes for the update; private names of Lightning 2.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata

_OWNER = "lit_pretrain"  # no hook of Lightning has this name, so that it never resets what stands under it


def log(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Hand metrics to ``trainer.callback_metrics`` and to the loggers; call it where ``should_log`` says so.

    All that is handed over within one update comes to the loggers as one row, together with what the module logs: with
    the row of this step where Lightning writes one, else (the last update of an epoch or a run) with that of the epoch.
    A logger called directly, as is public, gets a row per callback: ``CSVLogger`` then writes as many lines. That is
    what happens between batches (in validation hooks), where Lightning has no row to come.

    ``LightningModule.log`` would do so too, but copies and walks every value several times, at each step from then on:
    about 12 figures cost more than 10 ms of a contended core. So the values are put into Lightning's collection of
    logged values (``_results``) as they are, and are invisible there from the next batch on. Can go when Lightning
    takes finished numbers for its next row.
    """
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    trainer.callback_metrics.update(values)
    trainer.logged_metrics.update(values)
    if not trainer.loggers:
        return
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.total  # declared as a base class without `ready`
    if progress.completed >= progress.ready:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=loop._batches_that_stepped)
        return
    has_row = trainer._logger_connector.should_update_logs or trainer.fast_dev_run  # type: ignore[attr-defined]
    results: Any = loop._results
    for name, value in values.items():
        key = f"{_OWNER}.{name}"
        if key not in results:
            results[key] = _Figure(name, progress)
        results[key].set(value, has_row=bool(has_row))


class _Figure:
    """What Lightning's collection asks of an entry, for a number that needs no reduction.

    Args:
        name: Of the metric.
        progress: Counts batches; its ``ready`` tells which one is in progress.
    """

    is_tensor = True

    def __init__(self, name: str, progress: Any) -> None:
        self._of_step = _Metadata(fx=_OWNER, name=name, on_step=True, on_epoch=False)
        self._of_epoch = _Metadata(fx=_OWNER, name=name, on_step=False, on_epoch=True)
        self._progress = progress
        self.meta = self._of_step
        self._forward_cache: torch.Tensor | None = None
        self._computed: torch.Tensor | None = None
        self._batch = -1  # which one the value is of

    def set(self, value: torch.Tensor, *, has_row: bool) -> None:
        """Show ``value`` until the next batch (Lightning writes a row at the end of this one) or the epoch's end."""
        self.meta = self._of_step if has_row else self._of_epoch
        self._forward_cache = self._computed = value
        self._batch = self._progress.ready

    @property
    def has_reset(self) -> bool:
        """Whether there is nothing to show; asked first, and it is most of what an entry costs at other steps."""
        return self._computed is None or (self.meta.on_step and self._batch != self._progress.ready)

    def reset(self) -> None:
        """Show nothing."""
        self._forward_cache = self._computed = None
