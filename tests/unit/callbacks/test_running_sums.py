"""Means of an epoch that was stopped in its middle and resumed are those of the whole epoch, to the last bit."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanMetric, SumMetric

from lit_pretrain.callbacks import ExactResume
from lit_pretrain.plugins import FolderCheckpointIO
from tests.unit.callbacks.tiny import Tiny, loader, trainer

BATCHES = 16  # in an epoch; two make a window


class Logging(Tiny):
    """Logs in every way that sums up over an epoch."""

    def __init__(self):
        super().__init__(lr=0.05, dropout=0.3)
        self.mean, self.total = MeanMetric(), SumMetric()
        self.extra = torch.nn.ModuleDict({"again": MeanMetric()})

    def on_train_epoch_start(self):
        self.log("start", float(self.current_epoch) + 0.1, on_epoch=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ((self(x) - y) ** 2).mean()
        size = 1 + batch_idx % 3  # weights of a mean
        self.log("both", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("twice", loss, on_step=False, on_epoch=True, batch_size=size)
        self.log("whole", torch.tensor(float(batch_idx)), on_step=False, on_epoch=True)
        for reduce in ("sum", "min", "max"):
            self.log(reduce, loss * (1 + batch_idx), on_step=False, on_epoch=True, reduce_fx=reduce)
        if batch_idx == 0:
            self.log("once", loss, on_step=False, on_epoch=True)
        self.mean.update(loss, size)
        self.total(loss)
        self.extra["again"](loss)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=True, on_epoch=True)
        self.log("again", self.extra["again"], on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self):
        self.log("gradient", self.net[0].weight.grad.norm(), on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", ((self(x) - y) ** 2).mean())


NAMES = {
    "start", "both", "both_epoch", "twice", "whole", "sum", "min", "max", "once", "metric", "total_epoch", "again",
    "gradient",
}  # fmt: skip


class Ends(pl.Callback):
    """What the end of each epoch says."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, fit, module):
        self.seen.append({k: v.item() for k, v in fit.callback_metrics.items() if k in NAMES})


class Save(pl.Callback):
    order = 990

    def __init__(self, path, hook, count):
        self.path, self.left = path, count
        setattr(self, hook, self._save)

    def _save(self, fit, *_):
        self.left -= 1
        if self.left == 0:
            fit.save_checkpoint(self.path)


def fit(tmp_path, *callbacks, path=None, folders=False, **more):
    torch.manual_seed(7 if path is None else 8)
    ends = Ends()
    plugins = [FolderCheckpointIO()] if folders else None
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 6, "plugins": plugins, **more}
    run = trainer(tmp_path, ends, *callbacks, ExactResume(), **settings)
    run.fit(Logging(), loader(4 * BATCHES), loader(8), ckpt_path=path)
    return ends.seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"))


def test_the_oracle_sums_by_hand(whole):
    """Indices of batches of an epoch, 0 to 15, each of 4 rows."""
    assert whole[0].keys() == NAMES
    assert whole[0]["whole"] == pytest.approx(7.5)
    assert whole[0]["start"] == pytest.approx(0.1)
    assert whole[0]["metric"] == pytest.approx(whole[0]["twice"], rel=1e-5)
    assert whole[0] != whole[1]


MOMENTS = {
    "between two updates": ("on_train_batch_end", 8),
    "in a window": ("on_train_batch_start", 10),
    "after the first batch": ("on_before_backward", 2),
    "before a validation that is owed": ("on_train_batch_end", 6),
    "after that validation": ("on_validation_end", 1),
    "at the last batch": ("on_train_batch_end", BATCHES),
    "in the second epoch": ("on_train_batch_end", BATCHES + 4),
    "at the second epoch's start": ("on_train_batch_start", BATCHES + 1),
    "at the first epoch's end": ("on_train_epoch_end", 1),
}


@pytest.mark.parametrize("hook", MOMENTS.values(), ids=MOMENTS)
def test_means_of_a_resumed_epoch(tmp_path: Path, whole, hook):
    path = tmp_path / "saved.ckpt"
    assert fit(tmp_path, Save(path, *hook)) == whole
    resumed = fit(tmp_path, path=path)
    assert resumed == whole[-len(resumed) :]
    assert resumed


def test_a_run_that_stopped_in_an_epoch_and_is_made_longer(tmp_path, whole):
    """Lightning announces the epoch's end where a run stops, and clears its sums."""
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, Save(path, "on_train_end", 1), max_steps=4)
    assert fit(tmp_path, path=path) == whole


def test_from_a_folder_too(tmp_path, whole):
    fit(tmp_path, Save(tmp_path / "saved", "on_train_batch_end", 8), folders=True)
    assert fit(tmp_path, path=tmp_path / "saved", folders=True) == whole


def test_without_them_the_mean_is_of_the_rest(tmp_path, whole):
    """What an older checkpoint, which holds no sums, gives; and proof that the sums above did something."""
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, Save(path, "on_train_batch_end", 8))
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lit_pretrain_exact_resume"]["sums"]
    torch.save(checkpoint, path)
    assert fit(tmp_path, path=path)[0]["whole"] == pytest.approx(11.5)
    assert whole[0]["whole"] == pytest.approx(7.5)


class Otherwise(Logging):
    """The module has changed since: what was a mean is a sum now, and a metric has gone."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ((self(x) - y) ** 2).mean()
        self.log("whole", torch.tensor(float(batch_idx)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


def test_a_module_that_logs_otherwise_begins_anew(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, Save(path, "on_train_batch_end", 8))
    module, ends = Otherwise(), Ends()
    del module.mean
    run = trainer(tmp_path, ends, ExactResume(), max_epochs=1, accumulate_grad_batches=2, val_check_interval=6)
    run.fit(module, loader(4 * BATCHES), loader(8), ckpt_path=path)
    assert ends.seen[0]["whole"] == sum(range(8, 16))
    assert "metric" not in ends.seen[0]
