"""Ordinary LightningModules that know nothing of strategies, and a silent Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 6, 5


def rows(count: int, *, seed: int = 7) -> TensorDataset:
    """Features and a class each; float32."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, FEATURES, generator=g), torch.randint(CLASSES, (count,), generator=g))


class Layer(nn.Module):
    """A residual layer; five of them are what a strategy may take as units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Classifier(pl.LightningModule):
    """An MLP with a parameter of its own, two parameter groups and a scheduler; an odd width leaves uneven shards."""

    def __init__(self, *, width: int = 7, num_layers: int = 3, lr: float = 0.05) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.inputs = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.outputs = nn.Linear(width, CLASSES)
        self.temperature = nn.Parameter(torch.ones(()).reshape(1))
        for p in self.parameters():
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=g) * 0.4)
        self.lr = lr
        self.losses: list[float] = []
        self.seen: list[float] = []
        self.rates: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss.detach()))
        self.seen += x[:, 0].tolist()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True, batch_size=len(x))
        self.log("val_rows", float(len(x)), sync_dist=True, reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(-1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD(
            [{"params": weights}, {"params": rest, "lr": self.lr / 2}], lr=self.lr, momentum=0.9
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


def loader(count: int, *, batch_size: int, shuffle: bool = False) -> DataLoader:
    """A plain DataLoader, as a user writes it."""
    return DataLoader(rows(count), batch_size=batch_size, shuffle=shuffle)


class Dealt(pl.LightningDataModule):
    """Training rows dealt out in order: a sampler that Lightning injects would shuffle them."""

    def __init__(self, count: int, *, batch_size: int, held_out: int) -> None:
        super().__init__()
        self.count, self.batch_size, self.held_out = count, batch_size, held_out

    def train_dataloader(self) -> DataLoader:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        data = rows(self.count)
        sampler = DistributedSampler(data, shuffle=False, **place)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return loader(self.held_out, batch_size=self.batch_size)


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """A Trainer on the CPU that says nothing and writes nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    quiet |= {
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "precision": "64-true",
        "devices": 1,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(accelerator="cpu", strategy=strategy, **{**quiet, **settings})
