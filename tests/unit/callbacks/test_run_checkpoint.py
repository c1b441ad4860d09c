"""When RunCheckpoint saves, what it keeps, and what the checkpoints say."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lit_pretrain.callbacks import ExactResume, RunCheckpoint
from lit_pretrain.callbacks._saving import keeping
from lit_pretrain.distributed.checkpoint import catalog
from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import FolderCheckpointIO
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Scored(Tiny):
    """Validation gives a list of losses, one each time; a NaN among them."""

    scores = (5.0, 3.0, math.nan, 4.0, 2.0, 2.5)

    def __init__(self, **settings):
        super().__init__(lr=0.01, **settings)
        self.validations = 0

    def on_validation_epoch_end(self):
        self.log("score", torch.tensor(self.scores[self.validations % len(self.scores)]))
        self.validations += 1


class Trace(Callback):
    """Where each save happened."""

    def __init__(self):
        self.saves = []
        self.hook = "?"

    def on_train_batch_start(self, *_):
        self.hook = "batch"

    def on_validation_end(self, *_):
        self.hook = "after validation"

    def on_train_epoch_end(self, *_):
        self.hook = "after epoch"

    def on_save_checkpoint(self, fit, module, checkpoint):
        self.saves.append((fit.global_step, self.hook))


def fit(tmp_path, saver, *callbacks, module=None, path=None, validate=3, folders=False, **settings):
    """16 microbatches an epoch, 8 updates."""
    io = [FolderCheckpointIO()] if folders else None
    settings = {"max_steps": 12, "accumulate_grad_batches": 2, "plugins": io, **settings}
    if validate:
        settings |= {"val_check_interval": 2 * validate, "check_val_every_n_epoch": None}
    else:
        settings |= {"limit_val_batches": 0}
    run = trainer(tmp_path, saver, *callbacks, ExactResume(), enable_checkpointing=True, **settings)
    run.fit(module or Scored(), loader(), loader(8), ckpt_path=path)
    return run


def kept(tmp_path):
    folder = tmp_path / "checkpoints"
    return sorted(int(name.removesuffix(".ckpt").removeprefix("step-")) for name in os.listdir(folder))


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_cadence_and_what_stays(tmp_path, folders):
    fit(tmp_path, RunCheckpoint(every_n_steps=2, keep_last=2, keep_every=6), validate=0, folders=folders, max_steps=15)
    assert kept(tmp_path) == [6, 12, 14, 15]


def test_after_the_validation_and_the_epoch_that_are_due(tmp_path):
    trace = Trace()
    fit(tmp_path, RunCheckpoint(every_n_steps=2), trace)
    assert trace.saves == [
        (2, "batch"),
        (4, "batch"),
        (6, "after validation"),
        (8, "after epoch"),
        (10, "batch"),
        (12, "after validation"),
    ]


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_the_best_stays(tmp_path, folders):
    """Validations at 1, 2, ... 6 score 5, 3, nan, 4, 2, 2.5: better at 1, 2 and 5."""
    saver = RunCheckpoint(monitor="score", keep_last=1)
    run = fit(tmp_path, saver, validate=1, max_steps=6, folders=folders)
    assert kept(tmp_path) == [5, 6]
    assert Path(saver.best_model_path).name.startswith("step-00000005")
    assert saver.best_model_score == 2.0
    assert run.checkpoint_callback is saver
    assert saver.last_model_path.startswith(str(tmp_path / "checkpoints" / "step-00000006"))
    if folders:
        reasons = {found.facts.global_step: found.facts for found in catalog.complete(tmp_path / "checkpoints")}
        assert (reasons[5].reason, reasons[6].reason) == ("best", "end")
        assert reasons[5].monitors == {"score": 2.0}
        assert (reasons[5].microbatches_read, reasons[5].updates_read) == (10, 5)


def test_the_best_is_remembered_over_a_resume_and_a_move(tmp_path):
    fit(tmp_path / "a", RunCheckpoint(monitor="score"), validate=1, max_steps=2)
    (tmp_path / "a").rename(tmp_path / "b")
    worse = Scored()
    worse.scores = (3.5,)
    saver = RunCheckpoint(monitor="score", keep_last=1)
    path = tmp_path / "b" / "checkpoints" / "step-00000002.ckpt"
    fit(tmp_path / "b", saver, module=worse, path=path, validate=1, max_steps=4)
    assert saver.best_model_path == str(path)
    assert saver.best_model_score == 3.0
    assert kept(tmp_path / "b") == [2, 4]
    other = RunCheckpoint(monitor="val/loss")
    fit(tmp_path / "b", other, path=path, validate=1, max_steps=3)
    assert other.best_model_path.endswith("step-00000003.ckpt")


def test_by_the_maximum(tmp_path):
    saver = RunCheckpoint(monitor="score", mode="max", keep_last=1, save_at_end=False)
    fit(tmp_path, saver, validate=1, max_steps=5)
    assert saver.best_model_score == 5.0
    assert kept(tmp_path) == [1]


def test_a_metric_that_nobody_logs_is_said_once(tmp_path):
    with pytest.warns(UserWarning, match=r"monitor='nothing' is not among the logged metrics \(score, train/loss"):
        fit(tmp_path, RunCheckpoint(monitor="nothing"), validate=1, max_steps=3)
    assert kept(tmp_path) == [3]


def test_by_the_clock(tmp_path):
    """Every update takes a minute here, and the clock is read once per update."""

    class Minutes(Callback):
        now = 0.0

        def on_before_optimizer_step(self, *_):
            self.now += 60.0

    clock = Minutes()
    saver = RunCheckpoint(every_minutes=3, keep_last=9, save_at_end=False, clock=lambda: clock.now)
    fit(tmp_path, saver, clock, validate=0, max_steps=11)
    assert kept(tmp_path) == [3, 6, 9]


def test_nothing_is_saved_twice_and_nothing_when_debugging(tmp_path):
    trace = Trace()
    saver = RunCheckpoint(every_n_steps=4, monitor="score")
    fit(tmp_path, saver, trace, validate=4, max_steps=8)
    assert [step for step, _ in trace.saves] == [4, 8]
    path = saver.last_model_path
    again = Trace()
    fit(tmp_path, RunCheckpoint(every_n_steps=4, monitor="score"), again, validate=4, max_steps=8, path=path)
    assert again.saves == []  # a finished run does nothing
    fit(tmp_path / "fast", RunCheckpoint(every_n_steps=1), validate=0, fast_dev_run=True, max_steps=1)
    assert not (tmp_path / "fast" / "checkpoints").exists()


class Boom(Callback):
    order = 990

    def __init__(self, hook, step, error):
        self.error = error
        self.step = step
        setattr(self, hook, self._raise)

    def _raise(self, fit, *_):
        if fit.global_step == self.step:
            raise self.error


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_train_batch_end"])
def test_an_exception_saves_what_is_whole(tmp_path, hook):
    """Raised in the window after update 5: the checkpoint stands at its start, and the run goes on from there."""
    whole, broken = Scored(dropout=0.2), Scored(dropout=0.2)
    torch.manual_seed(3)
    fit(tmp_path / "whole", RunCheckpoint(), module=whole)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path / "b", RunCheckpoint(), Boom(hook, 5, RuntimeError("boom")), module=broken)
    assert kept(tmp_path / "b") == [5]
    path = tmp_path / "b" / "checkpoints" / "step-00000005.ckpt"
    facts = torch.load(path, weights_only=True)["lit_pretrain"]["facts"]
    assert (facts["reason"], facts["microbatches_read"]) == ("exception", 10)
    fit(tmp_path / "b", RunCheckpoint(), module=broken, path=path)
    for a, b in zip(whole.parameters(), broken.parameters(), strict=True):
        assert torch.equal(a, b)


def test_ctrl_c_saves_and_half_an_update_does_not(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path / "a", RunCheckpoint(), Boom("on_train_batch_start", 3, KeyboardInterrupt()))
    assert kept(tmp_path / "a") == [3]

    class Torn(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            loss = closure()
            self.calls += 1
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            if self.calls == 4:
                raise RuntimeError("in the middle of the weights")
            return loss

    with pytest.raises(RuntimeError, match="in the middle of the weights"):
        fit(tmp_path / "b", RunCheckpoint(), module=Scored(optimizer=lambda ps: Torn(ps, lr=0.1)))
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_weights_that_are_not_numbers_are_not_saved(tmp_path):
    with pytest.raises(FloatingPointError):
        fit(tmp_path, RunCheckpoint(), Boom("on_train_batch_end", 3, FloatingPointError("nan")))
    assert not (tmp_path / "checkpoints").exists()


def test_a_save_that_fails_after_an_exception_does_not_hide_it(tmp_path):

    class InTheWay(Boom):
        def _raise(self, fit, *_):
            if fit.global_step == self.step:
                (tmp_path / "checkpoints").write_text("a file where the folder should be")
            super()._raise(fit)

    boom = InTheWay("on_train_batch_start", 3, RuntimeError("boom"))
    with (
        pytest.warns(UserWarning, match="Nothing could be saved after RuntimeError"),
        pytest.raises(RuntimeError, match="boom"),
    ):
        fit(tmp_path, RunCheckpoint(), boom)


WAYS = {
    "a file": (lambda path: (path.parent.mkdir(), path.write_text("")), "is a file"),
    "a file above": (lambda path: path.parent.write_text(""), "is a file"),
    "a link to nothing": (lambda path: (path.parent.mkdir(), path.symlink_to("nowhere")), "is a link to nothing"),
    "a read-only place": (None, "may not be written to"),
}


@pytest.mark.parametrize(("make", "says"), WAYS.values(), ids=WAYS)
def test_a_place_that_takes_no_checkpoint_is_refused_before_the_first_step(tmp_path, monkeypatch, make, says):
    folder = tmp_path / "run" / "checkpoints"
    if make is None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may do everything
    else:
        make(folder)
    with pytest.raises(ConfigError, match=f"callbacks.checkpoint.dirpath=.*{says}; name another folder"):
        fit(tmp_path, RunCheckpoint(folder), Boom("on_train_batch_start", 0, AssertionError("a step")), validate=0)
    fit(tmp_path, RunCheckpoint(folder), validate=0, fast_dev_run=True, max_steps=1)  # saves nothing


def test_a_link_to_another_disk_is_a_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    saver = RunCheckpoint(every_n_steps=2, keep_last=1)
    fit(tmp_path, saver, validate=0, max_steps=4, folders=True)
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["step-00000004"]
    path = catalog.newest(tmp_path / "checkpoints").path
    assert fit(tmp_path, RunCheckpoint(), validate=0, max_steps=6, folders=True, path=path).global_step == 6


def test_alone_it_saves_at_boundaries_only(tmp_path):
    """Without ExactResume a window cannot be rewound, so an exception inside one saves nothing."""
    boom = Boom("on_after_backward", 3, RuntimeError("boom"))
    run = trainer(tmp_path, RunCheckpoint(), boom, enable_checkpointing=True, max_steps=5, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(Tiny(lr=0.01), loader(), loader(8))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0 must be at least 1"),
        ({"keep_last": 0}, r"keep_last=0 must be at least 1"),
        ({"keep_every": -1}, r"keep_every=-1 must be at least 1"),
        ({"every_minutes": 0}, r"every_minutes=0 must be above 0"),
        ({"mode": "best"}, r"mode='best' must be min or max"),
    ],
)
def test_impossible_settings(settings, says):
    with pytest.raises(ConfigError, match=says):
        RunCheckpoint(**settings)


def test_surplus():
    steps = [1, 2, 3, 4, 5, 6, 7]
    assert keeping.surplus(steps, keep_last=2, keep_every=None, keep=()) == [1, 2, 3, 4, 5]
    assert keeping.surplus(steps, keep_last=2, keep_every=3, keep={1}) == [2, 4, 5]
    assert keeping.surplus(steps, keep_last=9, keep_every=None, keep=()) == []


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_a_run_that_begins_spares_the_checkpoints_of_an_earlier_one(tmp_path, folders):
    def begin(steps, path=None, where="checkpoints"):
        saver = RunCheckpoint(tmp_path / where, every_n_steps=1)
        fit(tmp_path, saver, path=path, validate=0, folders=folders, max_steps=steps)
        return saver

    last = begin(3).last_model_path
    for word in (None, "last"):
        with pytest.raises(ConfigError, match=r"holds step-00000003.* of an earlier run") as error:
            begin(4, word)
        assert last in str(error.value)
    assert kept(tmp_path) == [2, 3]
    begin(4, last)
    begin(1, where="elsewhere")
