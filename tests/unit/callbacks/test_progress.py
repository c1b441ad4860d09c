from __future__ import annotations

import re
import sys

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import PretrainProgress
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Timed(Tiny):
    """A step takes 2 s of a clock that the test owns."""

    now = 0.0

    def training_step(self, batch, batch_idx):
        self.now += 2.0
        return super().training_step(batch, batch_idx)


def lines_of(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("update", "validation"))]


def test_plain_lines_without_a_terminal(tmp_path, capsys):
    model = Timed(lr=0.05)
    bar = PretrainProgress(interval_s=6.0, tokens_per_batch=500, clock=lambda: model.now)
    t = trainer(tmp_path, bar, max_steps=10, val_check_interval=5, enable_progress_bar=True)
    t.fit(model, loader(), loader())
    out = capsys.readouterr().out
    assert "\r" not in out
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if line.startswith(("update", "validation"))]
    shapes = [re.sub(r"loss \S+", "loss L", line) for line in lines]
    assert shapes == [
        "update 3/10 | loss L | tokens 1.5K | tokens/s 250 | 14s left",
        "validation at update 5: val/loss L",
        "update 6/10 | loss L | tokens 3K | tokens/s 250 | 8s left",
        "update 9/10 | loss L | tokens 4.5K | tokens/s 250 | 2s left",
        "validation at update 10: val/loss L",
        "update 10/10 | loss L | tokens 5K | tokens/s 250 | 0s left",
    ]
    assert f"loss {float(t.callback_metrics['train/loss']):.4g}" in lines[-1]


def test_updates_not_batches_and_several_epochs(tmp_path, capsys):
    model = Timed(lr=0.05)
    bar = PretrainProgress(interval_s=0.0, clock=lambda: model.now)
    trainer(tmp_path, bar, max_epochs=2, accumulate_grad_batches=8, enable_progress_bar=True).fit(model, loader())
    lines = lines_of(capsys)
    assert len(lines) == 2 * 16 + 1
    assert lines[-1].startswith("update 4/4 |")
    assert "tokens" not in lines[-1]


def test_the_loss_that_training_step_returned_in_full_units(tmp_path, capsys):
    """Lightning hands out the loss divided by the number of accumulated batches."""

    class Quiet(Tiny):
        def training_step(self, batch, batch_idx):
            return ((self(batch[0])) ** 2).mean() * 0 + 6.0

    bar = PretrainProgress(interval_s=0.0)
    trainer(tmp_path, bar, max_steps=1, accumulate_grad_batches=4, enable_progress_bar=True).fit(Quiet(), loader())
    assert all(re.search(r"loss 6\b", line) for line in lines_of(capsys))


class Terminal:
    """Standard output that claims to be a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


def test_one_bar_on_a_terminal(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = PretrainProgress(refresh_s=0.0, tokens_per_batch=500)
    t = trainer(tmp_path, bar, max_epochs=2, enable_progress_bar=True, num_sanity_val_steps=1)
    t.fit(Tiny(lr=0.05), loader(), loader())
    assert "32/32" in terminal.text
    assert "tokens=16K" in terminal.text
    assert re.search(r"tokens/s=\d", terminal.text)
    assert "Epoch" not in terminal.text
    assert "Validation" in terminal.text
    counts = [int(n) for n in re.findall(r"Training:.*?\| (\d+)/32", terminal.text)]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_starts_where_a_resumed_run_is(tmp_path, capsys):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    bar = PretrainProgress(tokens_per_batch=100)
    trainer(tmp_path, bar, saver, max_steps=4, enable_checkpointing=True, enable_progress_bar=True).fit(
        Tiny(), loader()
    )
    capsys.readouterr()
    model = Timed()
    bar = PretrainProgress(interval_s=0.0, tokens_per_batch=100, clock=lambda: model.now)
    trainer(tmp_path, bar, max_steps=8, enable_progress_bar=True).fit(
        model, loader(), ckpt_path=tmp_path / "step=4.ckpt"
    )
    first = lines_of(capsys)[0]
    assert first.startswith("update 5/8 |")
    assert "tokens 500" in first
    assert first.endswith("6s left")


def test_disabled_and_fast_dev_run(tmp_path, capsys):
    class Off(Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.progress_bar_callback.disable()

    t = trainer(tmp_path, PretrainProgress(interval_s=0.0), Off(), max_steps=2, enable_progress_bar=True)
    t.fit(Tiny(), loader())
    assert not lines_of(capsys)
    t = trainer(tmp_path, PretrainProgress(), fast_dev_run=2, enable_progress_bar=True)
    t.fit(Tiny(), loader(), loader())
    t.validate(Tiny(), loader(), verbose=False)
    assert lines_of(capsys)[-1].startswith("update 2/2 |")


def test_settings_that_make_no_sense():
    with pytest.raises(ConfigError, match="interval_s=-1"):
        PretrainProgress(interval_s=-1)
    with pytest.raises(ConfigError, match="tokens_per_batch=0"):
        PretrainProgress(tokens_per_batch=0)


def test_a_run_that_somebody_ended_has_no_time_left(tmp_path, capsys):
    class Ends(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 4

    model = Timed(lr=0.05)
    bar = PretrainProgress(interval_s=4.0, tokens_per_batch=500, clock=lambda: model.now)
    trainer(tmp_path, bar, Ends(), max_steps=10, enable_progress_bar=True).fit(model, loader())
    first, *_, last = lines_of(capsys)
    assert first.endswith("left")
    assert last.startswith("update 4/10")
    assert "left" not in last
