"""TokenDataModule on two real ranks: together they read what one process reads, before and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lit_pretrain.corpus import ShardFolders, ShardWriter
from lit_pretrain.data import TokenDataModule

T = 8
UPDATES = 12  # into the second epoch


class Reader(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.read += batch["ids"].tolist()
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        targets = batch["targets"]
        self.validated += targets[targets != -100].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def write(folder: Path) -> dict[str, dict[str, str]]:
    random = np.random.default_rng(0)
    for name, size in (("a", 700), ("b", 300), ("a-val", 120), ("b-val", 50)):
        with ShardWriter(folder / name, vocab_size=500, eos_id=0) as writer:
            for _ in range(size // 50):
                writer.add(random.integers(1, 500, 49))
    return {
        "sources": {name: str(folder / name) for name in "ab"},
        "validation": {name: str(folder / f"{name}-val") for name in "ab"},
    }


def fit(folders: dict[str, Any], micro: int, devices: int, folder: str, ckpt: str | None) -> dict[str, Any]:
    """Trains 12 rows an update, saves after update 4."""
    module = Reader()
    data = TokenDataModule(
        ShardFolders(**folders), sequence_length=T, micro_batch_size=micro, global_batch_size=12, seed=1
    )
    checkpoint = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_steps=UPDATES,
        accumulate_grad_batches=12 // (micro * devices),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[checkpoint] if ckpt is None else [],
        enable_checkpointing=ckpt is None,
    ).fit(module, datamodule=data, ckpt_path=ckpt)
    return {"read": module.read, "validated": module.validated, "epoch": data.updates_per_epoch}


def together(parts: list[list[list[int]]], micro: int) -> list[list[int]]:
    """Rows in the order of the global batches: microbatch by microbatch, rank by rank."""
    steps = len(parts[0]) // micro
    return [row for step in range(steps) for part in parts for row in part[step * micro : (step + 1) * micro]]


def test_two_ranks_read_what_one_process_reads(ranks: Any, tmp_path: Path) -> None:
    folders = write(tmp_path)
    whole = fit(folders, 6, 1, str(tmp_path / "one"), None)
    assert len(whole["read"]) == 12 * UPDATES
    assert whole["epoch"] == (699 // T + 299 // T) // 12

    two = ranks(2, fit, folders, 3, 2, str(tmp_path / "two"), None)
    assert together([rank["read"] for rank in two], 3) == whole["read"]
    assert two[0]["read"] != two[1]["read"]
    # one validation at the epoch's end: every held-out target once, over both ranks
    assert sorted(two[0]["validated"] + two[1]["validated"]) == sorted(whole["validated"])
    assert len(whole["validated"]) == 99 + 49

    checkpoint = str(tmp_path / "two" / "step=4.ckpt")
    rest = whole["read"][12 * 4 :]
    again = ranks(2, fit, folders, 3, 2, str(tmp_path / "x"), checkpoint)
    assert together([rank["read"] for rank in again], 3) == rest
    # another number of ranks, another microbatch size
    assert fit(folders, 4, 1, str(tmp_path / "x"), checkpoint)["read"] == rest
    wider = ranks(2, fit, folders, 2, 2, str(tmp_path / "x"), str(tmp_path / "one" / "step=4.ckpt"))
    assert together([rank["read"] for rank in wider], 2) == rest
