"""What inspect says of the folder of a program that is not ours, but has our callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import ChinchillaBudget, ExactResume, LossSpikeRollback, RunCheckpoint
from lit_pretrain.cli import main
from lit_pretrain.plugins import FolderCheckpointIO
from lit_pretrain.spikes import LedgerFile, RollbackPolicy, Skip
from tests.unit.callbacks.tiny import Tiny, loader, trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    callbacks, settings = (ExactResume(), RunCheckpoint(every_n_steps=2)), {"plugins": [FolderCheckpointIO()]}
    fit = trainer(tmp_path, *callbacks, max_steps=4, enable_checkpointing=True, **settings)
    fit.fit(Tiny(lr=0.01), loader())
    LedgerFile(tmp_path / "spikes.jsonl").append(
        Skip(step=2, low=2, high=4, spike=3, kind="high", loss=9.5, details={"batches": [3]})
    )
    return tmp_path


def inspected(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    capfd.readouterr()
    code = main(["inspect", *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return out


def test_its_checkpoints_and_spikes_are_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = inspected(capfd, str(folder))
    assert "not begun by lit-pretrain" in out
    assert "damaged" not in out
    assert "4 updates" in out
    assert out.count("looks whole") == 2
    assert "update 3: high, loss 9.5" in out
    assert "batches 3" in out
    assert f'trainer.fit(..., ckpt_path="{folder}/checkpoints/step-00000004")' in out


def test_the_ledger_alone_is_a_run(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "spikes.jsonl").rename(alone / "spikes.jsonl")
    assert "update 3: high, loss 9.5" in inspected(capfd, str(alone))
    (entry,) = json.loads(inspected(capfd, str(alone), "format=json"))["spikes"]
    assert entry["left_out"] == [2, 4]


def test_what_a_budget_came_to_and_why_it_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """100 tokens a batch: the third update reaches 250, and stands in no checkpoint of Lightning's."""
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    budget = ChinchillaBudget(None, max_tokens=250, tokens_per_batch=100)
    trainer(tmp_path, budget, saver, max_steps=10, enable_checkpointing=True).fit(Tiny(lr=0.01), loader())
    out = inspected(capfd, str(tmp_path))
    assert "3 updates" in out
    assert "by budget: budget.max_tokens is reached with 300 tokens" in out
    assert "at update 3: 300 tokens that count" in out
    left = json.loads(inspected(capfd, str(tmp_path), "format=json"))["left_behind"]
    assert left["stopped"].startswith("by budget")


def test_why_a_rollback_gave_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And a run that goes on from there has not stopped."""

    class Bad(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    back = LossSpikeRollback(policy=RollbackPolicy(max_rollbacks=0))
    trainer(tmp_path, back, max_steps=4).fit(Bad(lr=0.01), loader())
    assert "by rollback: Update 1: the loss is nan" in inspected(capfd, str(tmp_path))
    trainer(tmp_path, LossSpikeRollback(), max_steps=1).fit(Tiny(lr=0.01), loader())
    assert not (tmp_path / "stopped.json").exists()


def test_a_budget_of_an_earlier_run_does_not_say_how_far_this_one_came(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "budget.json").write_text(json.dumps({"updates": 999, "tokens": 5, "tokens_per_parameter": 1.0}))
    out = inspected(capfd, str(folder))
    assert "4 updates" in out
    assert "at update 999" in out
