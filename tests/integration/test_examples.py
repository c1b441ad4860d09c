"""The examples do what their text says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lit_pretrain.spikes import LedgerFile


def load(repository: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, repository / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_regression_survives_its_damaged_rows(repository: Path, tmp_path: Path) -> None:
    """The noise has a variance of 0.0025: a loss below 0.05 means that the curve is learnt."""
    example = load(repository, "regression")
    helped = example.train(with_callbacks=True, folder=str(tmp_path / "helped"))
    alone = example.train(with_callbacks=False, folder=str(tmp_path / "alone"))
    assert helped["rollbacks"] >= 5  # at least one in each epoch
    assert helped["val_loss"] < 0.05 < 1.0 < alone["val_loss"]
    spikes = LedgerFile(tmp_path / "helped" / "spikes.jsonl").read().entries
    (named,) = zip(*(entry.details["batches"] for entry in spikes), strict=True)  # one batch is one update
    assert {batch % 100 for batch in named} <= {60, 61, 62}  # those that are damaged, of 100 in an epoch
    assert {batch // 100 for batch in named} == set(range(5))


def test_its_module_is_an_ordinary_one(repository: Path) -> None:
    source = (repository / "examples" / "regression.py").read_text()
    project = source.split("# --- The project")[1].split("# --- What lit-pretrain adds")[0]
    assert "lit_pretrain" not in project


@pytest.mark.slow
def test_the_demo_of_a_spike_draws_both_curves(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of its size: the poisoned window is rolled back, and the picture is not empty."""
    demo = load(repository, "spike_demo")
    monkeypatch.setattr(demo, "UPDATES", 70)
    monkeypatch.setattr(demo, "POISON", range(40, 46))
    pl.seed_everything(0, verbose=False)
    alone, _ = demo.train(tmp_path, "alone", rolls_back=False, cache_dir="~/.cache/lit-pretrain")
    back, said = demo.train(tmp_path, "back", rolls_back=True, cache_dir="~/.cache/lit-pretrain")
    demo.draw(tmp_path, alone, back)
    assert said
    assert max(loss for step, loss in alone.items() if step > 40) > max(
        loss for step, loss in back.items() if step > 40
    )
    assert (tmp_path / "spike.png").stat().st_size > 10_000
