"""A plain LightningModule, and a Trainer that says nothing and writes nowhere."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(n=64, *, batch_size=4, seed=1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=dtype)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


class Tiny(LightningModule):
    """Regression on three features; every choice an argument."""

    def __init__(self, *, lr=1.0, optimizer=None, dropout=0.0, poison=(), value=float("nan")):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1))
        self.lr = lr
        self.make_optimizer = optimizer or (lambda ps: torch.optim.SGD(ps, lr=self.lr))
        self.poison = set(poison)
        self.value = value

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ((self(x) - y) ** 2).mean()
        if batch_idx in self.poison:
            loss = loss * self.value
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", ((self(x) - y) ** 2).mean())

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Rates(Callback):
    """The rate each batch was trained with, read when its gradients are ready."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append([g["lr"] for g in trainer.optimizers[0].param_groups])

    @property
    def first_group(self):
        return [rates[0] for rates in self.seen]


def trainer(tmp_path, *callbacks, **settings):
    settings = {"max_epochs": -1 if "max_steps" in settings else 1, "logger": False, **settings}
    settings.setdefault("enable_checkpointing", False)
    settings.setdefault("enable_progress_bar", False)
    return Trainer(
        accelerator="cpu",
        devices=settings.pop("devices", 1),
        default_root_dir=tmp_path,
        enable_model_summary=False,
        callbacks=list(callbacks),
        num_sanity_val_steps=settings.pop("num_sanity_val_steps", 0),
        log_every_n_steps=settings.pop("log_every_n_steps", 1),
        **settings,
    )
