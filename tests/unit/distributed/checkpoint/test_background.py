"""A save in a thread holds what was there when it was called, and its errors are heard."""

from __future__ import annotations

import threading

import pytest
import torch

from lit_pretrain.distributed.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    CheckpointFacts,
    background,
    read_checkpoint,
    read_rng,
    verify,
)
from lit_pretrain.distributed.checkpoint.folder import write_packed


class Gate:
    """Stands in for the writing: waits until it is opened, then writes or fails."""

    def __init__(self, monkeypatch):
        self.open, self.entered, self.running, self.most = threading.Event(), threading.Event(), 0, 0
        self.error, self.seen, self.addresses = None, [], []
        monkeypatch.setattr(background, "write_packed", self)

    def __call__(self, folder, packed, **settings):
        self.running += 1
        self.most = max(self.most, self.running)
        self.entered.set()
        assert self.open.wait(30)
        self.addresses.append({name: tensor.data_ptr() for name, tensor in packed.tensors.items()})
        self.seen.append(folder.name)
        self.running -= 1
        if self.error:
            raise self.error
        return write_packed(folder, packed, **settings)


def facts(step):
    return CheckpointFacts(global_step=step, updates_read=step)


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    writer = BackgroundWriter()
    weight, inner, rng = torch.ones(3), torch.zeros(2), torch.get_rng_state()
    tree = {"epoch": 1, "metric": inner, "list": [1]}
    writer.save(tmp_path / "c", tensors={"model.a": weight}, tree=tree, rng=[{"torch": rng}], facts=facts(1))
    assert gate.entered.wait(30)
    assert writer.saving == tmp_path / "c"
    kept = rng.clone()
    weight.fill_(7), inner.fill_(7), rng.zero_()
    tree["epoch"] = 2
    tree["list"].append(2)
    gate.open.set()
    writer.wait()
    assert writer.saving is None
    read, tensors = read_checkpoint(tmp_path / "c")
    assert torch.equal(tensors["model.a"], torch.ones(3))
    assert torch.equal(read["metric"], torch.zeros(2))
    assert read["epoch"] == 1
    assert read["list"] == [1]
    assert torch.equal(read_rng(tmp_path / "c")[0]["torch"], kept)


def test_never_two_saves_at_once_and_the_host_memory_is_used_again(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.open.set()
    writer = BackgroundWriter()
    weight = torch.zeros(1000)
    for step in range(4):
        weight += 1
        writer.save(tmp_path / f"step-{step}", tensors={"model.a": weight}, tree={}, facts=facts(step))
    writer.wait()
    assert gate.most == 1
    assert gate.seen == [f"step-{step}" for step in range(4)]
    assert len({found["model.a"] for found in gate.addresses}) == 1
    assert gate.addresses[0]["model.a"] != weight.data_ptr()
    for step in range(4):
        _, tensors = read_checkpoint(tmp_path / f"step-{step}")
        assert torch.equal(tensors["model.a"], torch.full((1000,), step + 1.0))
    grown = torch.ones(2000, dtype=torch.float64)
    writer.save(tmp_path / "grown", tensors={"model.a": grown}, tree={}, facts=facts(9))
    writer.close()
    assert torch.equal(read_checkpoint(tmp_path / "grown")[1]["model.a"], grown)


@pytest.mark.parametrize("heard_by", ["save", "wait", "close"])
def test_an_error_is_raised_by_the_next_call_and_once(tmp_path, monkeypatch, heard_by):
    gate = Gate(monkeypatch)
    gate.open.set()
    gate.error = CheckpointError("the disk is full")
    writer = BackgroundWriter()
    again = {"tensors": {}, "tree": {}, "facts": facts(2)}
    writer.save(tmp_path / "c", **again)
    writer._thread.join()
    call = {
        "save": lambda: writer.save(tmp_path / "d", **again),
        "wait": writer.wait,
        "close": writer.close,
    }[heard_by]
    with pytest.raises(CheckpointError, match="the disk is full"):
        call()
    assert gate.seen == ["c"]
    writer.wait()
    gate.error = None
    writer.save(tmp_path / "e", **again)
    writer.close()
    assert verify(tmp_path / "e").global_step == 2


def test_work_that_relies_on_a_save_waits_for_its_success(tmp_path, monkeypatch):
    gate, done = Gate(monkeypatch), []
    writer = BackgroundWriter()
    writer.after(lambda: done.append("at once"))
    assert done == ["at once"]
    writer.save(tmp_path / "c", tensors={}, tree={}, facts=facts(1))
    writer.after(lambda: done.append((tmp_path / "c/COMPLETE").exists()))
    assert gate.entered.wait(30)
    assert done == ["at once"]
    gate.open.set()
    writer.wait()
    assert done == ["at once", True]


def test_after_a_failed_save_nothing_that_relied_on_it_is_done(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.error = CheckpointError("no")
    writer = BackgroundWriter()
    writer.save(tmp_path / "c", tensors={}, tree={}, facts=facts(1))
    assert gate.entered.wait(30)
    done = []
    writer.after(lambda: done.append("an older checkpoint is lost"))
    gate.open.set()
    writer._thread.join()
    assert writer.failed
    writer.after(lambda: done.append("another is lost"))
    with pytest.raises(CheckpointError, match="no"):
        writer.wait()
    assert done == []
    assert not writer.failed


def test_an_error_of_that_work_is_heard_too(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    writer = BackgroundWriter()
    writer.save(tmp_path / "c", tensors={}, tree={}, facts=facts(1))
    writer.after(lambda: 1 / 0)
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert verify(tmp_path / "c").global_step == 1


def test_what_cannot_be_saved_is_refused_in_the_call(tmp_path):
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError, match="cannot be saved"):
        writer.save(tmp_path / "c", tensors={}, tree={"a": object()}, facts=facts(1))
    writer.close()
    assert list(tmp_path.iterdir()) == []
