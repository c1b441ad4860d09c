"""Running sums of what a training logs with ``on_epoch``, taken out of Lightning's results and put back after a resume.

Lightning 2.6 saves none of them: an epoch that was resumed in its middle reports the mean of its second half. It keeps
them in ``_results`` of the training loop, one ``_ResultMetric`` a logged name, private like all names here. Can go when
Lightning's checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

_SETTINGS = ("fx", "name", "prog_bar", "logger", "on_step", "add_dataloader_idx", "dataloader_idx", "metric_attribute")

Sums = dict[str, dict[str, Any]]


def capture(trainer: Trainer) -> Sums:
    """What this rank has summed up in the epoch so far, by Lightning's key. Waits for no device.

    Plain numbers are held as they are, for Lightning replaces them; a torchmetrics object changes its state in place,
    so that is copied.
    """
    sums: Sums = {}
    for key, item in trainer.fit_loop.epoch_loop._results.items():
        if not isinstance(item, _ResultMetric) or item.has_reset or not item.meta.on_epoch:
            continue
        metric: Any = item if item.is_tensor else item.value
        copy = _same if item.is_tensor else _copied
        sums[key] = {
            **{name: getattr(item.meta, name) for name in _SETTINGS},
            "reduce": item.meta.reduce_fx.__name__,
            "sync": item.meta.sync.should,
            "rank_zero_only": item.meta.sync.rank_zero_only,
            "state": {name: copy(value) for name, value in metric.metric_state.items()},
            "updates": metric.update_count,
        }
    return sums


def plain(sums: Sums) -> Sums:
    """The same on the host, for a checkpoint."""
    return {key: {**one, "state": {k: _on_host(v) for k, v in one["state"].items()}} for key, one in sums.items()}


def restore(trainer: Trainer, module: LightningModule, sums: Mapping[str, Mapping[str, Any]]) -> None:
    """Put sums back in ``on_train_start``: what is logged from now on is added to them.

    Args:
        trainer: Resumed in the middle of an epoch.
        module: Holds the torchmetrics objects that were logged; what it no longer has is left out.
        sums: From :func:`plain`.
    """
    if not sums:
        return
    results = trainer.fit_loop.epoch_loop._results
    for key, one in sums.items():
        metric = _metric(module, one["metric_attribute"])
        if one["metric_attribute"] is not None and metric is None:
            continue
        meta = _Remembered(
            **{name: one[name] for name in _SETTINGS}, on_epoch=True, reduce_fx=getattr(torch, one["reduce"])
        )
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=one["sync"], rank_zero_only=one["rank_zero_only"])
        meta.owner = item = _ResultMetric(meta, metric is None)
        if metric is not None:
            item.value = metric
        for owner in (item,) if metric is None else (item, metric):
            owner._update_count, owner._computed = one["updates"], None
        for name, value in one["state"].items():
            setattr(item if metric is None else metric, name, _on_device(value, trainer.strategy.root_device))
        results[key] = item
    # In the middle of an epoch; at its first batch Lightning would clear them all.
    trainer._logger_connector._first_loop_iter = False


class _Remembered(_Metadata):
    """How a value was logged. It gives way to what the next call says: functions and process groups cannot be saved."""

    owner: _ResultMetric

    def __ne__(self, other: object) -> bool:
        """Lightning asks whether a call agrees with the one before."""
        assert isinstance(other, _Metadata)
        if other.reduce_fx.__name__ != self.reduce_fx.__name__ or not other.on_epoch:
            self.owner.__init__(other, self.owner.is_tensor)  # type: ignore[misc]  # another sum: it begins anew
        self.owner.meta = other
        return False


def _metric(module: LightningModule, name: str | None) -> Metric | None:
    try:
        found = None if name is None else module.get_submodule(name)
    except AttributeError:
        return None
    return found if isinstance(found, Metric) else None


def _same(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.detach().clone()


def _on_host(value: Any) -> Any:
    return [_on_host(item) for item in value] if isinstance(value, list) else value.detach().cpu().clone()


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on_device(item, device) for item in value]
    assert isinstance(value, Tensor)
    return value.to(device)
