"""A checkpoint saved by anybody in any hook is one from which the run goes on exactly."""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_pretrain.callbacks import ExactResume, RunCounters
from tests.support import resumable
from tests.unit.callbacks.tiny import Tiny, trainer

HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


@pytest.fixture(autouse=True)
def _quiet():
    names = ["lightning.pytorch", "lightning.pytorch.utilities.rank_zero"]
    before = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("shards"))


def saver(folder: Path, *, stride: int, offset: int = 0) -> pl.Callback:
    """Calls ``Trainer.save_checkpoint`` in every hook there is; every ``stride``-th call in a hook really saves."""

    class Save(pl.Callback):
        order = 998
        counts: dict[str, int] = {}  # noqa: RUF012

    def hook(name):
        def save(self, fit, *_):
            n = self.counts[name] = self.counts.get(name, 0) + 1
            if n % stride == offset % stride:
                fit.save_checkpoint(folder / f"{name}-{n:03d}.ckpt")

        return save

    Save.counts = {}
    for name in HOOKS:
        setattr(Save, name, hook(name))
    return Save()


def events(folder: str | Path) -> list[dict[str, Any]]:
    return [line for line in resumable.lines(str(folder)) if "start" not in line]


def resumes_exactly(root, tmp_path, *, stride, offset=0, **settings):
    """Save here and there, resume from each, compare with what followed there; gives the names that were tried."""
    whole = tmp_path / "whole"
    settings = {"checkpoint": {"every_n_steps": None, "save_at_end": False}, **settings}  # the hooks save
    save = saver(tmp_path / "saved", stride=stride, offset=offset)
    expected = resumable.run(root, str(whole), callbacks=[save], **settings)
    names = sorted(os.listdir(tmp_path / "saved"))
    for name in names:
        folder = tmp_path / name
        got = resumable.run(root, str(folder), ckpt_path=str(tmp_path / "saved" / name), **settings)
        followed = events(folder)
        assert followed == (events(whole)[-len(followed) :] if followed else []), name
        same = expected if followed else {k: v for k, v in expected.items() if k in ("weights", "optimizer", "step")}
        assert {k: got[k] for k in same} == same, name
        if "train_batch_start" in name or "backward" in name:  # the window's start: nothing of it is lost
            assert followed[0]["read"] % 2 == 0
    return names


def test_saved_by_anybody_in_any_hook(root, tmp_path):
    names = resumes_exactly(root, tmp_path, stride=13, offset=4)
    assert {name.split("-")[0] for name in names} >= {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_backward",
    }
    assert len(names) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("interval", [6, 8, 5], ids=["at epoch ends", "not at epoch ends", "inside windows"])
@pytest.mark.parametrize("length", [{}, {"max_steps": -1, "max_epochs": 2}], ids=["steps", "epochs"])
def test_saved_in_every_hook(root, tmp_path, interval, length):
    """Every fifth of the hooks' calls: 5 divides neither the hooks of an update nor the updates of an epoch."""
    names = resumes_exactly(root, tmp_path, stride=5, offset=interval, val_check_interval=interval, **length)
    assert len(names) > 20


def test_validation_leaves_no_trace_in_the_random_state(root, tmp_path):
    """The noise of `resumable` draws in every validation batch; the losses do not know."""
    resumable.run(root, str(tmp_path / "a"), max_steps=8, val_check_interval=4)
    resumable.run(root, str(tmp_path / "b"), max_steps=8, val_check_interval=12)
    losses = [[x["loss"] for x in events(tmp_path / name) if "update" in x] for name in "ab"]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 8


def test_a_validation_inside_a_window_counts_once(root, tmp_path):
    """Validation after the fifth microbatch, saved before the sixth, the last of its window: it is run again."""
    settings = {"val_check_interval": 5, "max_steps": 4}
    save = saver(tmp_path / "saved", stride=6)
    whole = resumable.run(root, str(tmp_path / "a"), callbacks=[save], **settings)
    path = str(tmp_path / "saved" / "on_train_batch_start-006.ckpt")
    again = resumable.run(root, str(tmp_path / "b"), ckpt_path=path, **settings)
    assert [x["validated"] for x in events(tmp_path / "b") if "validated" in x] == [2]
    assert again == whole


def test_counts_stand_at_the_boundary(root, tmp_path):
    """Saved in the second half of the third window: two updates of 8 x 8 tokens are done, and no more."""
    save = saver(tmp_path / "saved", stride=6)  # the sixth microbatch
    resumable.run(root, str(tmp_path / "a"), callbacks=[save], max_steps=4)
    checkpoint = torch.load(tmp_path / "saved" / "on_train_batch_start-006.ckpt", weights_only=True)
    counts = checkpoint["callbacks"]["RunCounters"]
    assert (counts["tokens"], counts["tokens_read"], counts["updates"]) == (128.0, 128.0, 2)
    assert checkpoint["global_step"] == 2
    assert checkpoint["lit_pretrain"]["facts"]["microbatches_read"] == 4
    assert checkpoint["lit_pretrain"]["facts"]["updates_read"] == 2
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    assert set(progress.values()) == {4}


def test_names_of_the_parameters(root, tmp_path):
    save = saver(tmp_path / "saved", stride=1)
    resumable.run(root, str(tmp_path / "a"), callbacks=[save], max_steps=1)
    checkpoint = torch.load(tmp_path / "saved" / "on_train_batch_end-002.ckpt", weights_only=True)
    (groups,) = checkpoint["lit_pretrain"]["parameter_names"]
    sizes = [len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"]]
    assert [len(names) for names in groups] == sizes
    state = checkpoint["optimizer_states"][0]["state"]
    for number, name in enumerate(name for names in groups for name in names):
        assert state[number]["exp_avg"].shape == checkpoint["state_dict"][name].shape, name


# ---------------------------------------------------------------- foreign projects


class Foreign(Tiny):
    """A module with dropout and an ordinary loader; notes what it read."""

    def __init__(self, *, workers: int = 0, shuffle: bool = True, kind: str = "map") -> None:
        super().__init__(lr=0.05, dropout=0.3)
        self.loader = {"num_workers": workers, "shuffle": shuffle} if kind == "map" else {}
        self.kind = kind
        self.read: list[list[float]] = []
        self.losses: list[str] = []

    def training_step(self, batch, batch_idx):
        self.read.append(batch[0].flatten().tolist())
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss).hex())
        return loss

    def train_dataloader(self):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(44, 3, generator=g)
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        if self.kind == "iterable":
            return torch.utils.data.DataLoader(Stream(rows), batch_size=4)
        loader = torch.utils.data.DataLoader(rows, batch_size=4, **self.loader)
        return Stateful(loader) if self.kind == "stateful" else loader

    def val_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4
        )


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows[i] for i in range(len(self.rows)))


class Stateful:
    """A loader that keeps its own place, and has no length."""

    def __init__(self, loader):
        self.loader, self.at, self.start = loader, 0, 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        for i, batch in enumerate(self.loader):
            if i >= self.at:
                self.at += 1
                yield batch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


def foreign(tmp_path, path=None, *, callback=None, module=None, seed=5, **settings):
    pl.seed_everything(seed, verbose=False)
    module = module or Foreign()
    settings = {"max_steps": 14, "accumulate_grad_batches": 2, **settings}  # 11 batches, 6 updates an epoch
    callbacks = [callback] if callback is not None else []
    resume = settings.pop("resume", None) or ExactResume()
    fit = trainer(tmp_path, *callbacks, resume, **settings)  # listed last on purpose
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = warnings.filters[:]
        fit.fit(module, ckpt_path=path)
        assert warnings.filters == filters
    module.said = [str(w.message) for w in caught]
    return module


@pytest.mark.parametrize("update", [3, 6, 9])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_ordinary_loader_is_read_again_to_the_place(tmp_path, update, shuffle):
    """Epochs of 11 batches: the last window of each has one; 6 is an epoch's end, 9 stands in the second epoch."""
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=update, save_top_k=-1)
    whole = foreign(tmp_path, callback=save, module=Foreign(shuffle=shuffle), enable_checkpointing=True)
    resumed = foreign(tmp_path, tmp_path / f"step={update}.ckpt", module=Foreign(shuffle=shuffle), seed=99)
    assert resumed.read == whole.read[-len(resumed.read) :]
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert not any("not resumable" in text for text in resumed.said)  # Lightning's, and here it is wrong
    assert len(whole.read) - len(resumed.read) == {3: 6, 6: 11, 9: 17}[update]
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    if shuffle:
        assert whole.read[:11] != whole.read[11:22]


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("map", {"resume": "no replay"}, r"begin the epoch anew, though 6 of its batches were read"),
        ("iterable", {}, r"IterableDataset is read again"),
        ("stateful", {}, r"have no length: Lightning had read one batch ahead"),
    ],
)
def test_what_cannot_be_exact_is_said(tmp_path, kind, settings, says):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    foreign(tmp_path, callback=save, module=Foreign(kind=kind), enable_checkpointing=True, max_steps=4)
    if settings:
        settings = {"resume": ExactResume(replay=False)}
    resumed = foreign(tmp_path, tmp_path / "step=3.ckpt", module=Foreign(kind=kind), max_steps=5, **settings)
    assert any(__import__("re").search(says, text) for text in resumed.said), resumed.said
    assert any("dataloader is not resumable" in text for text in resumed.said) == bool(settings)


def test_a_checkpoint_without_it_is_said(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    pl.seed_everything(1, verbose=False)
    trainer(tmp_path, save, max_steps=2, enable_checkpointing=True).fit(Foreign())
    resumed = foreign(tmp_path, tmp_path / "step=2.ckpt", max_steps=2, accumulate_grad_batches=1)
    assert any("was written without ExactResume" in text for text in resumed.said)


def test_an_early_stop_stays_one(root, tmp_path):
    """The checkpoint of the very validation that stopped the run: a resumed run does not train on."""

    class Worse(pl.Callback):
        def on_validation_epoch_end(self, fit, module):
            module.log("worse", float(fit.global_step))

    def stop(patience):
        return [Worse(), EarlyStopping("worse", patience=patience)]

    first = resumable.run(root, str(tmp_path / "a"), callbacks=stop(2))
    assert first["step"] == 9  # best at 3, worse at 6 and 9
    again = resumable.run(root, str(tmp_path / "a"), callbacks=stop(2))
    assert again["step"] == 9
    assert resumable.run(root, str(tmp_path / "a"), max_steps=10)["step"] == 10  # without it the run goes on


def test_a_raised_patience_counts(root, tmp_path, caplog):
    """Best at update 3, worse ever after: a patience of 2 stops at 9, of 4 at 15, whether given at once or later."""

    class Worse(pl.Callback):
        def on_validation_epoch_end(self, fit, module):
            module.log("worse", float(fit.global_step))

    def stop(patience):
        return [Worse(), EarlyStopping("worse", patience=patience)]

    whole = resumable.run(root, str(tmp_path / "whole"), callbacks=stop(4))
    assert whole["step"] == 15
    assert resumable.run(root, str(tmp_path / "parts"), callbacks=stop(2))["step"] == 9
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        assert resumable.run(root, str(tmp_path / "parts"), callbacks=stop(4)) == whole
    assert "EarlyStopping('worse').patience was 2 in the checkpoint and is 4 now: 4 counts." in caplog.text
    assert resumable.run(root, str(tmp_path / "parts"), callbacks=stop(3))["step"] == 15  # it had stopped for good


def test_a_longer_run_goes_on_inside_the_epoch(root, tmp_path):
    """Stopped by max_steps in the middle of an epoch; with more steps it is as if it had never been told to stop."""
    whole = resumable.run(root, str(tmp_path / "a"))
    resumable.run(root, str(tmp_path / "b"), max_steps=13)
    longer = resumable.run(root, str(tmp_path / "b"))
    assert {k: longer[k] for k in longer if k != "stopping"} == {k: whole[k] for k in whole if k != "stopping"}
    reads = [[x["read"] for x in resumable.history(str(tmp_path / name)) if "read" in x] for name in "ab"]
    assert reads[0] == reads[1] == list(range(40))


def test_far_into_a_run(root, tmp_path):
    """The place is arithmetic: a checkpoint that says a million updates reads its first batch within a second."""

    class Waited(pl.Callback):
        def setup(self, *_, **__):
            self.seconds = -time.monotonic()

        def on_train_batch_start(self, *_):
            self.seconds += time.monotonic() if self.seconds < 0 else 0

    waited = Waited()
    save = saver(tmp_path / "saved", stride=2)
    resumable.run(root, str(tmp_path / "a"), callbacks=[save], max_steps=2)
    path = tmp_path / "saved" / "on_train_batch_end-002.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    far = 2_000_000 // 18 * 18 + 2  # one update into an epoch
    loops = checkpoint["loops"]["fit_loop"]
    loops["epoch_loop.batch_progress"]["total"] = dict.fromkeys(loops["epoch_loop.batch_progress"]["total"], far)
    torch.save(checkpoint, path)
    seen = resumable.run(root, str(tmp_path / "b"), ckpt_path=str(path), max_steps=2, callbacks=[waited])
    assert seen["step"] == 2
    reads = [x["read"] for x in events(tmp_path / "b") if "read" in x]
    assert reads == [far, far + 1]
    assert 0 < waited.seconds < 1


def test_counters_leave_out_what_was_dropped(tmp_path):
    class Drop(pl.Callback):
        def on_before_optimizer_step(self, fit, module, optimizer):
            if fit.global_step == 1:
                for p in module.parameters():
                    p.grad = None

    clock = iter(range(100))
    counters = RunCounters(tokens_per_batch=10, clock=lambda: float(next(clock)))
    trainer(tmp_path, counters, Drop(), max_steps=3, accumulate_grad_batches=2, limit_val_batches=0).fit(
        Foreign(kind="map")
    )
    assert (counters.tokens, counters.tokens_read, counters.updates) == (40.0, 60.0, 2)
    assert counters.seconds == counters.device_seconds == 4.0  # the start, three updates, the end: one second apart
    counters.rewind(updates=1, tokens=20.0)
    assert (counters.tokens, counters.tokens_read, counters.updates) == (20.0, 60.0, 1)
