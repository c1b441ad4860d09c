"""The newest whole checkpoint is found by content, others are passed over aloud, and pruning never takes the last."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from lit_pretrain.distributed.checkpoint import (
    CheckpointError,
    CheckpointFacts,
    catalog,
    complete,
    files,
    newest,
    plain,
    prune,
    write_checkpoint,
)


def save(parent, name, *, step, updates=None, **changes):
    facts = CheckpointFacts(global_step=step, updates_read=step if updates is None else updates)
    write_checkpoint(parent / name, tensors={"model.a": torch.full((4,), float(step))}, tree={}, facts=facts, **changes)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_newest_is_by_content_and_not_by_name_or_time(tmp_path):
    save(tmp_path, "z-old", step=10)
    save(tmp_path, "a-new", step=30)
    save(tmp_path, "m-between", step=20)
    os.utime(tmp_path / "z-old")
    assert [found.facts.global_step for found in complete(tmp_path)] == [30, 20, 10]
    assert newest(tmp_path).path.name == "a-new"


def test_updates_read_count_before_steps(tmp_path):
    """After a rollback the steps went back and the data did not."""
    save(tmp_path, "before", step=100, updates=100)
    save(tmp_path, "rolled-back", step=60, updates=120)
    assert newest(tmp_path).path.name == "rolled-back"


def test_of_two_at_one_place_the_later_one(tmp_path):
    save(tmp_path, "b", step=5)
    time.sleep(0.01)
    save(tmp_path, "a", step=5)
    assert newest(tmp_path).path.name == "a"


@pytest.mark.parametrize(
    "kind", ["manifest.json", "COMPLETE", "trainer.json", "tensors/.metadata", "tensors/__0_0.distcp"]
)
def test_a_damaged_one_is_passed_over_aloud(tmp_path, kind):
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", step=step)
    flip(tmp_path / "step-3" / kind)
    said = []
    assert newest(tmp_path, say=said.append).path.name == "step-2"
    assert len(said) == 2
    assert said[0].startswith("step-3 was not taken: ")
    assert kind.split("/")[-1] in said[0]
    assert said[1] == "Taken instead: step-2, step 2."


def test_an_unfinished_folder_is_passed_over_aloud(tmp_path):
    save(tmp_path, "step-1", step=1)
    save(tmp_path, "step-2", step=2)
    (tmp_path / "step-2/COMPLETE").unlink()
    said = []
    assert newest(tmp_path, say=said.append).path.name == "step-1"
    assert "has no COMPLETE file: its saving was cut off" in said[0]
    (tmp_path / "step-1/trainer.json").unlink()
    said.clear()
    assert newest(tmp_path, say=said.append) is None
    assert said[-1].endswith("holds no checkpoint that can be read.")


def test_nothing_is_said_where_nothing_is_wrong(tmp_path):
    said = []
    assert newest(tmp_path / "none", say=said.append) is None
    save(tmp_path, "step-1", step=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "old.ckpt").write_bytes(b"x")
    (tmp_path / files.temporary_name("step-2")).mkdir()
    assert newest(tmp_path, say=said.append).path.name == "step-1"
    assert said == []


def test_refused_ones_are_not_read(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", step=step)
    flip(tmp_path / "step-3/tensors/__0_0.distcp")
    said = []
    assert newest(tmp_path, accept=lambda found: found.facts.updates_read <= 1, say=said.append).path.name == "step-1"
    assert said == []


def test_the_size_is_that_of_the_files(tmp_path):
    save(tmp_path, "c", step=1)
    every = sum(p.stat().st_size for p in (tmp_path / "c").rglob("*") if p.is_file())
    own = sum((tmp_path / "c" / name).stat().st_size for name in ("manifest.json", "COMPLETE"))
    assert complete(tmp_path)[0].size == every - own


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": 1}, [60]),
        ({"keep_last": 99}, [10, 20, 30, 40, 50, 60]),
        ({}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": 1, "keep_every": 30}, [30, 60]),
        ({"keep_last": 1, "keep": {"step-20"}}, [20, 60]),
        ({"keep_every": 30}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_pruning(tmp_path, settings, left):
    for step in (30, 10, 60, 20, 50, 40):
        save(tmp_path, f"step-{step}", step=step)
    removed = prune(tmp_path, **settings)
    assert sorted(found.facts.global_step for found in complete(tmp_path)) == left
    assert len(removed) == 6 - len(left)
    assert all(not path.exists() for path in removed)


def test_pruning_does_not_count_damaged_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", step=step)
    os.truncate(tmp_path / "step-3/trainer.json", 1)
    prune(tmp_path, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}])
def test_pruning_never_removes_all(tmp_path, settings):
    save(tmp_path, "c", step=1)
    with pytest.raises(CheckpointError, match="must be at least 1"):
        prune(tmp_path, **settings)
    assert len(complete(tmp_path)) == 1


def test_a_kill_while_removing_leaves_no_damaged_folder(tmp_path, monkeypatch):
    save(tmp_path, "step-1", step=1)
    save(tmp_path, "step-2", step=2)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: (path / "COMPLETE").unlink())  # dies after one file
    prune(tmp_path, keep_last=1)
    said = []
    assert newest(tmp_path, say=said.append).path.name == "step-2"
    assert said == []
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["step-2"]


def test_what_dead_processes_left_is_removed_and_what_live_ones_write_is_not(tmp_path):
    program = "import sys; from lit_pretrain.distributed.checkpoint import files; print(files.temporary_name('step-9'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    dead = tmp_path / done.stdout.strip()
    mine = tmp_path / files.temporary_name("step-8")
    pid, token = mine.name.split(".")[2].split("-")
    before = tmp_path / f".step-7.{pid}-{token[:8]}{'0' * 16}.tmp"  # this process id, in an earlier life
    parent = tmp_path / f".step-6.{os.getppid()}-{token[:8]}{'0' * 16}.tmp"
    far = tmp_path / f".step-5.{pid}-{'f' * 8}{token[8:]}.tmp"  # of another host
    far_old = tmp_path / f".step-4.{pid}-{'e' * 8}{token[8:]}.tmp"
    foreign = tmp_path / ".other.tmp"
    for path in (dead, mine, before, parent, far, far_old, foreign):
        (path / "tensors").mkdir(parents=True)
    os.utime(far_old, (1, 1))
    assert sorted(catalog.clean(tmp_path)) == sorted([dead, before, far_old])
    assert set(tmp_path.iterdir()) == {mine, parent, far, foreign}


def test_plain_values_of_one_key(tmp_path):
    tree = {"run": {"config": {"a": [1, (2, None)]}, 3: "x"}, "net": {"w": torch.ones(2)}}
    write_checkpoint(tmp_path / "c", tensors={}, tree=tree, facts=CheckpointFacts(global_step=1))
    assert plain(tmp_path / "c", "run") == tree["run"]
    assert plain(tmp_path / "c", "none") is None
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'net\.w'"):
        plain(tmp_path / "c", "net")
    flip(tmp_path / "c/trainer.json")
    with pytest.raises(CheckpointError, match=r"trainer\.json is damaged"):
        plain(tmp_path / "c", "run")
