"""SIGKILL at any moment of a save: what is taken afterwards is whole, and what was cut off is said."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from lit_pretrain.distributed.checkpoint import complete, newest, prune, read_checkpoint, verify

# Imports once; for every line it reads, forks a process that saves without end, over three names in turns, and prunes
# as a run does. It starts no thread itself, so the forks are safe.
PROGRAM = """
import os, sys
from pathlib import Path
from lit_pretrain.distributed.checkpoint import CheckpointFacts, complete, prune, write_checkpoint
import torch
import torch.utils.serialization.config  # loaded late otherwise, in every fork
torch.set_num_threads(1)
parent = Path(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    print(os.getpid(), flush=True)
    step = max([found.facts.global_step for found in complete(parent)], default=0)
    while True:
        step += 1
        tensors = {f"model.{i}": torch.full((40_000,), float(step)) for i in range(4)}
        write_checkpoint(parent / f"at-{step % 3}", tensors=tensors, tree={"step": step},
                         facts=CheckpointFacts(global_step=step, updates_read=step))
        print(step, flush=True)
        prune(parent, keep_last=2)
"""


def killed(nursery: subprocess.Popen, *, after: Callable[[], object]) -> list[int]:
    """Steps that a saving process told and nobody has read yet, after it was killed."""
    nursery.stdin.write("go\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline())
    after()
    os.kill(pid, signal.SIGKILL)
    told = []
    while (line := nursery.stdout.readline().strip()) != "dead":
        told.append(int(line))
    return told


def drill(parent, *, kills: int, seed: int) -> dict[str, int]:
    """Kill a saving process so many times and look each time; gives what was seen."""
    moments = random.Random(seed)
    seen = {"unfinished": 0, "saves": 0}
    command = [sys.executable, "-c", PROGRAM, str(parent)]
    nursery = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert nursery.stdout.readline() == "ready\n"
        times: list[float] = []
        killed(nursery, after=lambda: times.extend((nursery.stdout.readline(), time.monotonic())[1] for _ in range(3)))
        per_save = (times[2] - times[0]) / 2
        known = 3
        for _ in range(kills):
            told = killed(nursery, after=lambda: time.sleep(moments.uniform(0.0, 4 * per_save)))
            known = max([known, *told])
            seen["saves"] += len(told)
            seen["unfinished"] += len(list(parent.glob(".*.tmp")))
            look(parent, known)
    finally:
        nursery.stdin.close()
        nursery.wait(30)
        nursery.stdout.close()
    return seen


def look(parent, known: int) -> None:
    """What a resume would find: the last save that was told to be done, or a later one, whole; nothing torn."""
    said: list[str] = []
    found = newest(parent, say=said.append)
    assert said == [], "a folder under a final name is damaged"
    assert found is not None
    assert found.facts.global_step >= known, "a save that was told to be done is not there"
    tree, tensors = read_checkpoint(found.path)
    assert tree == {"step": found.facts.global_step}
    assert all(torch.equal(t, torch.full((40_000,), float(tree["step"]))) for t in tensors.values())
    for other in complete(parent):
        verify(other.path)
    prune(parent)
    assert not list(parent.glob(".*.tmp")), "what a dead process left is still there"


def test_nothing_torn_is_ever_chosen(tmp_path):
    seen = drill(tmp_path, kills=10, seed=1)
    assert seen["saves"] > 0
    assert seen["unfinished"] > 0, "the kills missed the saves"


@pytest.mark.slow
def test_nothing_torn_is_ever_chosen_in_many_kills(tmp_path):
    seen = drill(tmp_path, kills=100, seed=2)
    assert seen["saves"] > 30
    assert seen["unfinished"] > 10, "the kills missed the saves"
