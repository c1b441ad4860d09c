"""Rollbacks beside a loss scaler: what the scaler skips is its own affair, and its state goes back with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.spikes import RollbackPolicy
from tests.support import resumable, spiking
from tests.support.spiking import differing


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


def against_the_oracle(root: str, folder: Path, rollback: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    got = spiking.run(root, str(folder / "rolled-back"), rollback=rollback, poison=[13], **settings)
    skip = [[low, high] for _, low, high, _ in got["ledger"]]
    return got, spiking.run(root, str(folder / "never-saw"), skip=skip, **settings)


def test_the_scaler_goes_back(root: str, tmp_path: Path) -> None:
    """By hand: data steps 6, 12 and 17 overflow, and 9 to 13 are left out, so two overflows count.

    The scale of 64 doubles after three clean updates and is halved by an overflow: 256 after data steps 0 to 5, 128
    after 6, 256 after 7, 8 and 14, 128 after 17, 512 after 18 to 23, and 24 is the twentieth.
    """
    got, want = against_the_oracle(root, tmp_path, {}, precision="fp16", overflow=[6, 12, 17])
    assert got["ledger"] == [(8, 9, 14, 12)]  # the snapshot of 8 updates, which stood before data step 9
    assert differing(got, want) == []
    scaler = {"scale": 512.0, "clean_updates": 1, "skipped_updates": 2, "consecutive_skips": 0}
    assert got["precision"] == {"scaler": scaler}
    assert got["updates"] == resumable.UPDATES - 2


def test_a_dropped_update_is_not_the_scaler_s(root: str, tmp_path: Path) -> None:
    """Overflows are no spikes, under ``skip`` either: they lower the scale and do not stand in the ledger."""
    got, want = against_the_oracle(root, tmp_path, {"mode": "skip"}, precision="fp16", overflow=[6, 17])
    assert got["ledger"] == [(12, 13, 14, 13)]
    assert differing(got, want) == []
    assert got["precision"]["scaler"]["skipped_updates"] == 2


def test_a_lower_rate_outlives_no_skipped_step(root: str, tmp_path: Path) -> None:
    """Data step 15 overflows while the rate is cut: afterwards it is the scheduler's own again."""
    policy = RollbackPolicy(lr_factor=0.5, lr_updates=6)
    settings = {"precision": "fp16", "overflow": [15], "scheduled": True}
    got, want = against_the_oracle(root, tmp_path, {"policy": policy}, **settings)
    assert differing(got, want) == ["weights", "masters", "optimizer"]  # made with lower rates for six updates
