"""Rollbacks on two ranks: every rank decides alike, and ends as one that never saw the data."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.callbacks import ChinchillaBudget
from tests.support import resumable, spiking

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"strategy": "zero3"},
    "zero1": {"strategy": "zero1"},
    "tp2": {"strategy": "tp2", "replicas": 1},
    "pp2": {"strategy": "pp2", "replicas": 1, "model": {"dropout": 0.0}},
}
QUICK = {("ddp", "poison"), ("ddp", "damage"), ("zero3", "poison"), ("pp2", "poison")}  # the others are slow tests
FAULTS: dict[str, dict[str, Any]] = {
    "poison": {"poison": [12, 13]},
    "not a number": {"poison": [13], "scale": float("nan")},
    "damage": {"damage": 14},
}


def train(root: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    return spiking.run(root, folder, **settings)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(x, f, marks=[] if (x, f) in QUICK else [pytest.mark.slow])
        for x, f in itertools.product(LAYOUTS, FAULTS)
    ],
)
def test_two_ranks(root: str, tmp_path: Path, ranks: Any, layout: str, fault: str) -> None:
    shape = LAYOUTS[layout]
    got = ranks(2, train, root, str(tmp_path / "rolled"), shape | FAULTS[fault] | {"rollback": {}})
    assert got[0]["ledger"] == got[1]["ledger"]
    assert got[0]["rollbacks"] >= 1
    skip = [[low, high] for _, low, high, _ in got[0]["ledger"]]
    want = ranks(2, train, root, str(tmp_path / "never"), shape | {"skip": skip})
    for mine, theirs in zip(got, want, strict=True):
        assert spiking.differing(mine, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("ddp", "fp16"), ("zero3", "fp16"), ("tp2", "fp16"), ("pp2", "fp16"), ("zero3", "bf16"), ("pp2", "bf16")],
)
def test_masters_and_scaler_go_back(root: str, tmp_path: Path, ranks: Any, layout: str, precision: str) -> None:
    """Two of three overflows are outside the stretch that is left out, and the scaler of each rank knows of two."""
    shape = LAYOUTS[layout] | {"precision": precision, "overflow": [6, 12, 17] if precision == "fp16" else []}
    got = ranks(2, train, root, str(tmp_path / "rolled"), shape | {"poison": [13], "rollback": {}})
    assert got[0]["ledger"] == got[1]["ledger"] != []
    skip = [[low, high] for _, low, high, _ in got[0]["ledger"]]
    want = ranks(2, train, root, str(tmp_path / "never"), shape | {"skip": skip})
    for mine, theirs in zip(got, want, strict=True):
        assert spiking.differing(mine, theirs) == []
        if precision == "fp16":
            assert mine["precision"]["scaler"]["skipped_updates"] == 2


@pytest.mark.parametrize("layout", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_an_update_is_dropped_on_all_ranks(root: str, tmp_path: Path, ranks: Any, layout: str) -> None:
    shape = LAYOUTS[layout]
    got = ranks(2, train, root, str(tmp_path / "dropped"), shape | {"poison": [12], "rollback": {"mode": "skip"}})
    assert [r["ledger"] for r in got] == [[(12, 12, 13, 13)]] * 2
    want = ranks(2, train, root, str(tmp_path / "never"), shape | {"skip": [[12, 13]]})
    for mine, theirs in zip(got, want, strict=True):
        assert spiking.differing(mine, theirs) == []


def train_on_a_budget(root: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    return spiking.run(root, folder, scheduled=True, extra=[ChinchillaBudget(None, max_tokens=600)], **settings)


@pytest.mark.parametrize("layout", ["ddp", pytest.param("tp2", marks=pytest.mark.slow)])
def test_a_budget_counts_tokens_once(root: str, tmp_path: Path, ranks: Any, layout: str) -> None:
    """600 tokens are reached by the tenth update of 64, however many ranks share them."""
    for rank in ranks(2, train_on_a_budget, root, str(tmp_path / "run"), LAYOUTS[layout]):
        assert (rank["step"], rank["tokens"]) == (10, 640)
