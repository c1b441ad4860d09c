"""A run that rolls back ends, bit for bit, as one that never saw the data: its oracle knows no rollback at all.

The oracle is the same run without LossSpikeRollback, whose data module leaves the same data steps out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks import ChinchillaBudget, TensorBoardContinuation
from lit_pretrain.spikes import MeanRule, RollbackPolicy
from tests.support import resumable, spiking
from tests.support.spiking import differing


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clean(root: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on all data."""
    return spiking.run(root, str(tmp_path_factory.mktemp("clean")))


def rolled_back(root: str, folder: Path, **settings: Any) -> dict[str, Any]:
    return spiking.run(root, str(folder / "rolled-back"), **({"rollback": {}} | settings))


def never_saw(root: str, folder: Path, got: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The oracle: data steps left out by the data module. Positions are data steps where nothing is skipped in it."""
    skip = [[low, high] for _, low, high, _ in got["ledger"]]
    return spiking.run(root, str(folder / "never-saw"), skip=skip, **settings)


POISONS: dict[str, dict[str, Any]] = {
    "a window": {"poison": [12, 13, 14]},
    "not a number": {"poison": [13], "scale": float("nan")},
    "two spikes": {"poison": [6, 14]},
    "over an epoch's end": {"poison": [8, 9], "rollback": {"detector": spiking.RULE, "every_n_steps": 3}},
    "no accumulation": {"poison": [12], "accumulation": 1},
}


@pytest.mark.parametrize("settings", POISONS.values(), ids=POISONS)
def test_poisoned_data(root: str, tmp_path: Path, clean: dict[str, Any], settings: dict[str, Any]) -> None:
    got = rolled_back(root, tmp_path, **settings)
    assert got["rollbacks"] == len(got["ledger"]) >= 1
    assert all(low <= step < high for (_, low, high, _), step in zip(got["ledger"], settings["poison"], strict=False))
    same = {k: v for k, v in settings.items() if k == "accumulation"}
    want = never_saw(root, tmp_path, got, **same)
    assert differing(got, want) == []
    assert got["weights"] != clean["weights"]
    left_out = {step for _, low, high, _ in got["ledger"] for step in range(low, high)}
    assert got["read"] == 64 * (resumable.UPDATES + len(left_out))


def test_the_snapshot_before_the_spike_is_taken(root: str, tmp_path: Path) -> None:
    """By hand: snapshots at 0, 4, 8, 12; data step 13 spikes in update 14; that of 12 is confirmed by update 13."""
    got = rolled_back(root, tmp_path, poison=[13])
    assert got["ledger"] == [(12, 12, 14, 14)]
    assert got["step"] == got["updates"] == resumable.UPDATES
    assert got["tokens"] == resumable.UPDATES * 64
    assert got["read"] == (resumable.UPDATES + 2) * 64


def test_a_spike_right_after_the_first_snapshot(root: str, tmp_path: Path) -> None:
    got = rolled_back(root, tmp_path, poison=[0], scale=float("nan"))
    assert got["ledger"] == [(0, 0, 1, 1)]
    assert differing(got, never_saw(root, tmp_path, got)) == []


def test_damaged_weights(root: str, tmp_path: Path, clean: dict[str, Any]) -> None:
    got = rolled_back(root, tmp_path, damage=14)
    assert [entry[0] for entry in got["ledger"]] == [12]
    assert differing(got, never_saw(root, tmp_path, got)) == []
    assert got["weights"] != clean["weights"]


def test_a_scheduler_of_lightning(root: str, tmp_path: Path) -> None:
    got = rolled_back(root, tmp_path, poison=[13], scheduled=True)
    assert got["rollbacks"] == 1
    assert differing(got, never_saw(root, tmp_path, got, scheduled=True)) == []


def test_snapshots_on_disk(root: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    got = rolled_back(root, tmp_path, poison=[13], rollback={"disk": str(disk)})
    assert got["rollbacks"] == 1
    assert differing(got, never_saw(root, tmp_path, got)) == []
    assert list(disk.rglob("*.bin")) == []


def test_a_lower_rate_for_a_while(root: str, tmp_path: Path) -> None:
    """The oracle cuts the rate by the schedule's own means."""
    policy = RollbackPolicy(lr_factor=0.5, lr_updates=4)
    got = rolled_back(root, tmp_path, poison=[13], rollback={"policy": policy})
    want = never_saw(root, tmp_path, got, extra=[spiking.CutFrom(12, 16, 0.5)])
    assert differing(got, want) == []


def test_a_lower_rate_where_somebody_else_owns_it(root: str, tmp_path: Path) -> None:
    """The scheduler neither sees the cut nor undoes it: its own rate is left when the cut is over."""
    policy = RollbackPolicy(lr_factor=0.5, lr_updates=4)
    cut = rolled_back(root, tmp_path, poison=[13], scheduled=True, rollback={"policy": policy})
    plain = never_saw(root, tmp_path, cut, scheduled=True)
    assert differing(cut, plain) == ["weights", "masters", "optimizer"]


def test_the_same_batch_again_and_again(root: str, tmp_path: Path) -> None:
    """Everything from step 10 on is bad: it goes further back each time, then stops with a state worth keeping."""
    policy = RollbackPolicy(max_rollbacks=2, distance=4)
    got = rolled_back(root, tmp_path, poison=list(range(10, 90)), rollback={"policy": policy})
    assert [entry[0] for entry in got["ledger"]] == [8, 4]
    assert got["ledger"][1][2] - got["ledger"][0][2] > 4  # and leaves more data out
    assert "max_rollbacks=2" in got["stop"]
    assert got["step"] <= 8
    saved = torch.load(next((tmp_path / "rolled-back/checkpoints").glob("*.ckpt")), weights_only=True)
    assert saved["global_step"] == got["step"]
    assert all(bool(value.isfinite().all()) for value in saved["state_dict"].values())
    assert float(max(value.abs().max() for value in saved["state_dict"].values())) < 3.0


def test_a_save_waits_until_a_suspicion_is_cleared_up(root: str, tmp_path: Path) -> None:
    """By hand: weights damaged before update 14, a rule that takes three such losses, a save due at 15.

    Saved there, the damage would be the only state left to go back to. Update 16 takes it back to the snapshot of 12,
    and the updates after it are saved at 15.
    """
    rule = MeanRule(factor=2.0, window=10, min_steps=3, patience=3)
    got = rolled_back(root, tmp_path, damage=13, save_every=15, rollback={"detector": rule, "every_n_steps": 4})
    assert got["ledger"] == [(12, 12, 16, 16)]
    assert differing(got, never_saw(root, tmp_path, got)) == []
    folder = tmp_path / "rolled-back" / "checkpoints"
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["step-00000015.ckpt", "step-00000020.ckpt"]
    saved = torch.load(folder / "step-00000015.ckpt", weights_only=True)
    assert float(max(value.abs().max() for value in saved["state_dict"].values())) < 3.0  # the damage is x 30


def test_a_stop_is_one(root: str, tmp_path: Path) -> None:
    """Also before the trainer's minimum, and saved by Lightning's own callback where there is no other.

    By hand: everything from step 10 on is bad, and one rollback is allowed: the second spike restores update 8.
    """
    saver = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=100, save_on_train_epoch_end=False)
    policy = RollbackPolicy(max_rollbacks=1)
    settings: dict[str, Any] = {"saver": saver, "min_steps": 18, "rollback": {"policy": policy}}
    got = rolled_back(root, tmp_path, poison=list(range(10, 90)), **settings)
    assert got["step"] == got["updates"] == 8
    assert "max_rollbacks=1" in got["stop"]
    (path,) = (tmp_path / "theirs").iterdir()
    assert path.name == "rollback-step-00000008.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 8
    assert [value.numpy().tobytes() for value in saved["state_dict"].values()] == got["weights"]


@pytest.mark.parametrize("scale", [60.0, float("nan")])
def test_an_update_is_dropped(root: str, tmp_path: Path, scale: float) -> None:
    got = rolled_back(root, tmp_path, poison=[12, 13], scale=scale, rollback={"mode": "skip"})
    assert got["ledger"] == [(12, 12, 13, 13), (12, 13, 14, 13)]
    assert differing(got, never_saw(root, tmp_path, got)) == []


def test_dropping_under_a_scheduler_of_lightning(root: str, tmp_path: Path) -> None:
    got = rolled_back(root, tmp_path, poison=[12], scheduled=True, rollback={"mode": "skip"})
    assert got["rollbacks"] == 1
    assert differing(got, never_saw(root, tmp_path, got, scheduled=True)) == []


def test_warn_changes_nothing(root: str, tmp_path: Path, clean: dict[str, Any]) -> None:
    told: list[Any] = []
    got = rolled_back(root, tmp_path, damage=14, rollback={"mode": "warn", "alarm": told.append})
    without = spiking.run(root, str(tmp_path / "without"), damage=14)
    assert differing(got, without) == []
    assert got["ledger"] == []
    assert [facts["update"] for facts in told][:1] == [15]
    assert "warn" in told[0]["action"]


def test_what_the_ledger_tells(root: str, tmp_path: Path) -> None:
    """By hand from the plan: the rows of data step 13, found in the files again."""
    from lit_pretrain.corpus import BatchPlan, open_tokens

    told: list[Any] = []
    got = rolled_back(root, tmp_path, poison=[13], rollback={"alarm": told.append})
    lines = (tmp_path / "rolled-back" / "spikes.jsonl").read_text().splitlines()
    assert lines == got["entries"]
    entry = json.loads(lines[0])
    assert entry["details"]["batches"] == [26, 27]  # two microbatches
    assert entry["kind"] == "jump"
    assert entry["loss"] > 100.0
    stream = open_tokens(Path(root) / "train")
    windows = (stream.num_tokens - 1) // resumable.T
    _, window = BatchPlan({"text": windows}, global_batch_size=8, tokens_per_row=resumable.T).rows(13)
    places = [(row["source"], Path(row["file"]).name, row["offset"]) for row in entry["details"]["documents"]]
    assert places == [("text", "shard-00000.bin", int(w) * resumable.T) for w in window]
    assert told[0]["batches"] == [26, 27]
    assert told[0]["update"] == 14


def test_a_fresh_run_in_the_folder_of_another_begins_anew(root: str, tmp_path: Path) -> None:
    rolled_back(root, tmp_path, poison=[13])
    shutil.rmtree(tmp_path / "rolled-back" / "checkpoints")
    again = rolled_back(root, tmp_path, poison=[13], ckpt_path=None)
    assert again["ledger"] == [(12, 12, 14, 14)]
    assert (tmp_path / "rolled-back" / "spikes-before-1.jsonl").exists()


@pytest.mark.parametrize("continuation", [True, False])
def test_curves_have_no_zigzag(root: str, tmp_path: Path, continuation: bool) -> None:
    """Read as TensorBoard reads it: one loss per update, none of them of the window that was taken back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "rolled-back"
    logger = TensorBoardLogger(folder, name="board", version="")
    extra = [TensorBoardContinuation()] if continuation else []
    got = rolled_back(root, tmp_path, poison=[13], extra=extra, logger=logger, log_every_n_steps=1)
    assert got["rollbacks"] == 1
    reader = EventAccumulator(str(folder / "board"))
    reader.Reload()
    losses = reader.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(resumable.UPDATES))
    assert max(event.value for event in losses) < 6.0
    told = {tag: reader.Scalars(f"spike/{tag}")[-1] for tag in ("rollbacks", "update", "loss", "z")}
    assert told["rollbacks"].value == 1.0
    assert told["update"].value == 14.0
    assert told["loss"].value > 100.0
    assert told["loss"].step == 12  # where the curve goes on
    assert "tensors" in reader.Tags()
    (text,) = reader.Tensors("spike/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert "Update 14" in said
    assert "26, 27" in said


def test_a_budget_counts_what_survived(root: str, tmp_path: Path) -> None:
    """960 tokens are 15 updates of 64; the two that were taken back do not count, though they were read."""
    budget = ChinchillaBudget(None, max_tokens=960)
    got = rolled_back(root, tmp_path, poison=[13], scheduled=True, extra=[budget])
    assert got["rollbacks"] == 1
    assert (got["updates"], got["tokens"], got["read"]) == (15, 960, 17 * 64)
    assert budget.reason == "budget.max_tokens is reached with 960 tokens"


@pytest.mark.parametrize("first", [11, 12])
def test_a_budget_that_ends_a_run_takes_no_random_numbers(root: str, tmp_path: Path, first: int) -> None:
    """A run that goes on under a larger budget is one that had it from the start; validation is due at 12 anyway."""

    def run(folder: str, updates: int) -> dict[str, Any]:
        budget = ChinchillaBudget(None, max_tokens=64 * updates)
        return spiking.run(root, str(tmp_path / folder), scheduled=True, extra=[budget])

    whole = run("whole", 14)
    run("stopped", first)
    assert differing(run("stopped", 14), whole) == []
