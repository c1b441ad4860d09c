"""What inspect says of the folder of a program that is not ours, but has our callbacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_pretrain.callbacks import ExactResume, RunCheckpoint
from lit_pretrain.cli import main
from lit_pretrain.plugins import FolderCheckpointIO
from lit_pretrain.spikes import LedgerFile, Skip
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
