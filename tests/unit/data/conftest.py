"""Small shards with known ids, and a module that records what it read."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_pretrain.corpus import ShardFolders, ShardWriter

VOCAB, EOS = 300, 0


def write_source(folder: Path, *, documents: int, length: int, seed: int) -> Path:
    """Documents of about ``length`` random ids other than EOS."""
    random = np.random.default_rng(seed)
    with ShardWriter(folder, vocab_size=VOCAB, eos_id=EOS, config_hash=folder.name) as writer:
        for _ in range(documents):
            writer.add(random.integers(1, VOCAB, int(random.integers(1, 2 * length))))
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shards")
    train = {
        "big": write_source(root / "big", documents=20, length=30, seed=1),
        "small": write_source(root / "small", documents=8, length=20, seed=2),
    }
    validation = {
        "big": write_source(root / "big-val", documents=9, length=20, seed=3),
        "small": write_source(root / "small-val", documents=4, length=10, seed=4),
    }
    return {"sources": train, "validation": validation}


@pytest.fixture
def corpus(shards: dict[str, Any]) -> ShardFolders:
    return ShardFolders(**shards)


class Recorder(pl.LightningModule):
    """Notes every batch it gets; its one weight learns nothing of interest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        self.validated: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.read.append(batch["index"])
        self.rows += [tuple(row) for row in batch["ids"].tolist()]
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += [tuple(row) for row in batch["targets"].tolist()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def quiet() -> Any:
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(level)


@pytest.fixture
def trainer(quiet: None, tmp_path: Path) -> Callable[..., pl.Trainer]:
    def make(**settings: Any) -> pl.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pl.Trainer(**(defaults | settings))

    return make


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder
