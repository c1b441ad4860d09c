"""What callbacks log for an update stands in one row of the loggers, with what the module logs for it."""

from __future__ import annotations

import csv

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_pretrain.callbacks import GradientClipping, ThroughputMonitor, WarmupCosine, _compat
from tests.unit.callbacks.tiny import Tiny, loader, trainer

OURS = {"optim/lr", "train/grad_norm", "train/grad_norm_clipped", "train/clip_share", "perf/tokens", "perf/step_time_s"}


class EpochMean(Tiny):
    """Also logs a mean over the epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/epoch_loss", loss, on_step=False, on_epoch=True)
        return loss


def rows_of(logger):
    """Per line of the file: the step, and what stands in it."""
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        lines = [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]
    return [(int(line.pop("step")), line) for line in lines]


def ours(*more):
    return [
        WarmupCosine(warmup_steps=2),
        GradientClipping(1.0),
        ThroughputMonitor(tokens_per_batch=10, ignore_updates=0),
        *more,
    ]


def fit(tmp_path, callbacks, *, module=None, val=False, **settings):
    logger = CSVLogger(tmp_path, name="run")
    run = trainer(tmp_path, *callbacks, logger=logger, **settings)
    run.fit(module or Tiny(lr=0.1), loader(), loader() if val else None)
    return rows_of(logger), run


def test_one_row_per_logged_update(tmp_path):
    rows, run = fit(tmp_path, ours(), max_steps=7, log_every_n_steps=2)
    # Lightning numbers updates from 0 and logs each second one; the last update is the run's last word.
    assert [step for step, _ in rows] == [1, 3, 5, 6]
    for step, row in rows[:3]:
        assert set(row) >= OURS | {"train/loss", "epoch"}
        assert row["perf/tokens"] == 10 * (step + 1)
    last = rows[3][1]
    assert set(last) >= OURS
    assert last["perf/tokens"] == 70
    assert last["optim/lr"] == pytest.approx(0.1 * 0.1), "the curve's end: a tenth of the peak"
    assert run.callback_metrics["perf/tokens"] == 70
    assert run.logged_metrics["perf/tokens"] == 70


def test_accumulation_and_validation(tmp_path):
    rows, _ = fit(
        tmp_path, ours(), max_steps=4, log_every_n_steps=1, accumulate_grad_batches=2, val=True, val_check_interval=4
    )
    training = [(step, row) for step, row in rows if "val/loss" not in row]
    assert [step for step, _ in training] == [0, 1, 2, 3]
    assert all(set(row) >= OURS | {"train/loss"} for _, row in training)
    # A row of Lightning's own, under the number of the update before it, and without what the callbacks said of that.
    assert [(step, set(row)) for step, row in rows if "val/loss" in row] == [
        (1, {"val/loss", "epoch"}),
        (3, {"val/loss", "epoch"}),
    ]


def test_the_last_word_of_an_epoch_joins_its_means(tmp_path):
    rows, _ = fit(tmp_path, ours(), module=EpochMean(lr=0.1), max_epochs=2, log_every_n_steps=1000)
    assert [step for step, _ in rows] == [15, 31]
    for step, row in rows:
        assert set(row) >= OURS | {"train/epoch_loss"}
        assert row["perf/tokens"] == 10 * (step + 1)


class Says(Callback):
    """Logs a number at one update, and one after each validation."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            _compat.log(trainer, {"said/once": 5.0})

    def on_validation_end(self, trainer, pl_module):
        _compat.log(trainer, {"said/after": float(trainer.global_step)})


def test_a_figure_stands_in_the_row_of_its_update_only(tmp_path):
    rows, run = fit(tmp_path, [Says()], max_steps=5)
    assert [(step, row.get("said/once")) for step, row in rows] == [
        (0, None),
        (1, 5.0),
        (2, None),
        (3, None),
        (4, None),
    ]
    assert run.callback_metrics["said/once"] == 5.0, "others may read it later"


def test_between_batches_a_row_of_its_own(tmp_path):
    rows, _ = fit(tmp_path, [Says()], max_steps=4, val=True, val_check_interval=2)
    after = [(step, row) for step, row in rows if "said/after" in row]
    assert after == [(1, {"said/after": 2.0}), (3, {"said/after": 4.0})]


def test_without_a_logger(tmp_path):
    run = trainer(tmp_path, *ours(), max_steps=3)
    run.fit(Tiny(lr=0.1), loader())
    assert run.callback_metrics["perf/tokens"] == 30
    assert run.logged_metrics["optim/lr"] == pytest.approx(0.01)
