"""The mixture's shares over a run, by hand from the schedule's points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_pretrain.callbacks import DataAnnealing
from lit_pretrain.corpus import ShardFolders, ShardWriter
from lit_pretrain.data import TokenDataModule
from lit_pretrain.errors import ConfigError

T, ROWS = 4, 8


class Bag(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(batch["ids"]).flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(pl.Callback):
    order = 1000

    def __init__(self) -> None:
        self.shares: list[tuple[float, float]] = []
        self.rows: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        known = trainer.callback_metrics
        self.shares.append((float(known["data/share/a"]), float(known["data/passes/a"])))
        self.rows.append(int((batch["source"] == 0).sum()))


@pytest.fixture
def corpus(tmp_path: Path) -> ShardFolders:
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name, vocab_size=16, eos_id=0, config_hash=name) as writer:
            writer.add(np.random.default_rng(1).integers(1, 16, 40 * T + 1))
    return ShardFolders(sources={"a": tmp_path / "a", "b": tmp_path / "b"})


def fit(folder: Path, module: Any, *callbacks: Any, **data: Any) -> None:
    pl.Trainer(
        accelerator="cpu",
        max_steps=9,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, **data)


def test_shares_follow_the_schedule(corpus: ShardFolders, tmp_path: Path) -> None:
    """All of source a at step 0, half at step 8, straight in between; a has 40 windows, 8 rows a step."""
    data = TokenDataModule(
        corpus,
        sequence_length=T,
        micro_batch_size=ROWS,
        global_batch_size=ROWS,
        weights={"points": [[0, {"a": 1.0, "b": 0.0}], [8, {"a": 0.5, "b": 0.5}]]},
    )
    seen = Seen()
    fit(tmp_path, Bag(), DataAnnealing(), seen, datamodule=data)
    assert [share for share, _ in seen.shares] == pytest.approx([1.0 - 0.0625 * i for i in range(9)])
    read = np.cumsum(seen.rows) / 40  # what the batches themselves hold
    assert [passes for _, passes in seen.shares] == pytest.approx(read.tolist())


def test_other_data_is_refused(tmp_path: Path) -> None:
    batches = [{"ids": torch.zeros(2, T, dtype=torch.int64), "targets": torch.zeros(2, T, dtype=torch.int64)}]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    with pytest.raises(ConfigError, match="has none; use TokenDataModule"):
        fit(tmp_path, Bag(), DataAnnealing(), train_dataloaders=loader)


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match=r"annealing\.num_points=1"):
        DataAnnealing(num_points=1)
