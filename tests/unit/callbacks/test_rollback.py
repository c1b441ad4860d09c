"""What LossSpikeRollback refuses, and where it has nothing to do; what it does is in tests/integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lit_pretrain.callbacks import GradientClipping, LossSpikeRollback
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import MeanRule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "undo"}, r"rollback\.mode='undo' is unknown"),
        ({"keep": 10**9}, r"rollback\.keep=1000000000 must be at most 1,000"),
        ({"ledger": 5}, r"rollback\.ledger=5 must be a path, or null"),
        ({"disk": ""}, r"rollback\.disk='' must be a path, or null"),
        ({"detector": MeanRule}, r"spikes\.rule=<class .*MeanRule'> must be robust or mean, or a rule object"),
        ({"keep": 0}, r"rollback\.keep=0 must be a whole number"),
        ({"every_n_steps": 2.5}, r"rollback\.every_n_steps=2\.5 must be a whole number"),
        ({"policy": {"max_rollbacks": 3}}, r"rollback\.policy={'max_rollbacks': 3} must be a RollbackPolicy"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSpikeRollback(**settings)


def test_a_folder_is_no_ledger_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"rollback\.ledger='.*mine' is a folder"):
        LossSpikeRollback(ledger=folder)
    assert folder.is_dir()


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.line(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1


def test_a_validation_alone_is_left_alone(tmp_path: Path) -> None:
    module = Line()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[LossSpikeRollback()], max_steps=1
    )
    trainer.validate(module, torch.utils.data.DataLoader(torch.zeros(3, 1)), verbose=False)
    assert module.validated == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (GradientClipping(1.0), r"GradientClipping\(non_finite='\w+'\) would too; give it non_finite='ignore'"),
        (
            StochasticWeightAveraging(1e-3),
            r"StochasticWeightAveraging keeps an average .* Lightning's WeightAveraging",
        ),
    ],
)
def test_who_does_not_go_with_it(tmp_path: Path, other: Any, message: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[LossSpikeRollback(), other], max_steps=1
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.zeros(3, 1)))
