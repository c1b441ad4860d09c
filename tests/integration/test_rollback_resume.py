"""Killed before, during and after a rollback, a run goes on to the very end that it would have come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.callbacks._rollback.moment import Moment
from lit_pretrain.errors import RankError
from lit_pretrain.spikes import LedgerFile, RollbackPolicy
from tests.support import resumable, spiking

# Data step 13 is bad: update 14 spikes and is taken back to update 12, the 14th window read. Two microbatches a window,
# a checkpoint after every fifth update.
BLOWS = {
    "before the spike": ("on_train_batch_start", 23),
    "in the bad window": ("on_before_optimizer_step", 14),
    "right after the rollback": ("on_train_batch_start", 29),
    "after it": ("on_before_optimizer_step", 17),
    "when all of it is saved": ("on_train_batch_start", 37),
}
SLOW = ("after it", "when all of it is saved")
COMPARED = (*spiking.DECIDED, "read", "ledger", "entries", "rollbacks")


def train(root: str, folder: str, kill: Any, settings: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kill, str):
        owner: Any = {"the ledger is written": Moment, "before the ledger": LedgerFile}[kill]
        name = {Moment: "restore", LedgerFile: "append"}[owner]
        setattr(owner, name, lambda *_: resumable.os.kill(resumable.os.getpid(), resumable.signal.SIGKILL))
        kill = None
    return spiking.run(root, folder, kill=kill, **({"rollback": {}, "poison": [13], "save_every": 5} | settings))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


def ends_alike(root: str, folder: Path, ranks: Any, blows: list[Any], world: int = 1, **settings: Any) -> Any:
    whole = ranks(world, train, root, str(folder / "whole"), None, settings)
    for blow in blows:
        with pytest.raises(RankError, match="SIGKILL"):
            ranks(world, train, root, str(folder / "killed"), blow, settings)
    got = ranks(world, train, root, str(folder / "killed"), None, settings)
    for mine, theirs in zip(got, whole, strict=True):
        assert spiking.differing(mine, theirs, COMPARED) == []
        assert theirs["rollbacks"] >= 1
    return got[0]


@pytest.mark.parametrize(
    "blow", [pytest.param(b, id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n, b in BLOWS.items()]
)
def test_one_kill(root: str, tmp_path: Path, ranks: Any, blow: tuple[str, int]) -> None:
    ends_alike(root, tmp_path, ranks, [blow])


@pytest.mark.parametrize("poison", [8, 9])
def test_a_jump_over_an_epochs_end_made_again(root: str, tmp_path: Path, ranks: Any, poison: int) -> None:
    """From the checkpoint that stands right before the jump: its random state is the one to go on with."""
    settings = {"poison": [poison], "save_every": 8, "max_steps": 14}
    ends_alike(root, tmp_path, ranks, [("on_train_batch_start", 25)], **settings)


@pytest.mark.parametrize("moment", ["before the ledger", "the ledger is written"])
def test_killed_in_a_rollback(root: str, tmp_path: Path, ranks: Any, moment: str) -> None:
    ends_alike(root, tmp_path, ranks, [moment])


@pytest.mark.slow
def test_killed_again_and_again(root: str, tmp_path: Path, ranks: Any) -> None:
    blows = [BLOWS["in the bad window"], "the ledger is written", ("on_train_batch_start", 9), ("on_after_backward", 7)]
    ends_alike(root, tmp_path, ranks, blows)


def test_a_fault_that_does_not_come_again(root: str, tmp_path: Path, ranks: Any) -> None:
    """The weights were damaged by chance: the resumed run knows of the rollback from the ledger alone."""
    settings = {"poison": [], "damage": 13, "save_every": 6}
    whole = ranks(1, train, root, str(tmp_path / "whole"), None, settings)[0]
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(1, train, root, str(tmp_path / "killed"), ("on_train_batch_start", 31), settings)
    got = ranks(1, train, root, str(tmp_path / "killed"), None, settings | {"damage": None})[0]
    assert whole["ledger"] != []
    assert spiking.differing(got, whole, COMPARED) == []


def test_two_rollbacks_and_a_kill_between(root: str, tmp_path: Path, ranks: Any) -> None:
    """The second goes further back: the resumed run has to hold the snapshots that the first one left."""
    settings = {"poison": [10, 12], "save_every": 6, "rollback": {"policy": RollbackPolicy(distance=3)}}
    got = ends_alike(root, tmp_path, ranks, [("on_train_batch_start", 24)], **settings)
    assert [entry[0] for entry in got["ledger"]] == [8, 6]


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["right after the rollback", "in the bad window"])
def test_two_ranks(root: str, tmp_path: Path, ranks: Any, blow: str) -> None:
    ends_alike(root, tmp_path, ranks, [BLOWS[blow]], world=2)
