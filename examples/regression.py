"""A regression with plain Lightning whose data are partly damaged, and three callbacks that see it through.

Run it with ``python examples/regression.py``; ``--plain`` trains without the callbacks, for comparison.
"""

from __future__ import annotations

import argparse
import math
import tempfile

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pretrain.callbacks import GradientStatistics, LossSpikeRollback, NonFiniteGuard
from lit_pretrain.spikes import MeanRule, RollbackPolicy

# --- The project: nothing in this part is of lit-pretrain.


class Curve(pl.LightningModule):
    """Fits a curve with a network of two hidden layers."""

    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.lr = lr

    def training_step(self, batch, batch_idx):  # noqa: D102
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):  # noqa: D102
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):  # noqa: D102
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}


def samples(count: int, *, seed: int, damaged: slice | None = None) -> TensorDataset:
    """Points of a curve with a little noise; some targets are far off, as after a bad join of two tables."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=draw) * 4 - 2
    y = torch.sin(math.pi * x) + 0.05 * torch.randn(count, 1, generator=draw)
    if damaged is not None:
        y[damaged] = 1e3
    return TensorDataset(x, y)


# --- What lit-pretrain adds: three callbacks.


def train(*, with_callbacks: bool, folder: str) -> dict[str, float]:
    """Train five epochs and return the validation loss and the number of rollbacks."""
    pl.seed_everything(1, verbose=False)
    rollback = LossSpikeRollback(
        MeanRule(factor=4.0, window=50, min_steps=20),
        every_n_steps=10,
        policy=RollbackPolicy(stretch=50, distance=4),  # trouble comes once in an epoch of 100 updates
    )
    callbacks: list[pl.Callback] = [
        NonFiniteGuard(action="report"),
        rollback,
        GradientStatistics(every_n_steps=50),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=5,
        callbacks=callbacks if with_callbacks else [],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Curve()
    # Not shuffled, so that the damaged rows come together: batches 60 to 62 of every epoch.
    data = DataLoader(samples(3200, seed=1, damaged=slice(60 * 32, 63 * 32)), batch_size=32)
    trainer.fit(module, data, DataLoader(samples(640, seed=2), batch_size=64))
    return {"val_loss": float(trainer.callback_metrics["val_loss"]), "rollbacks": float(rollback.rollbacks)}


def main() -> None:
    """Train and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="without the callbacks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = train(with_callbacks=not arguments.plain, folder=folder)
    print(f"validation loss {found['val_loss']:.4f} after {found['rollbacks']:.0f} rollbacks")


if __name__ == "__main__":
    main()
