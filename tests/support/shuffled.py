"""A Lightning project that is not ours in shape: a shuffled DataLoader, dropout, a scheduler that steps by epochs.

Beside it the same training as a bare loop of torch, which leaves data out by itself: the oracle of a rollback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lit_pretrain.callbacks import ExactResume, LossSpikeRollback
from lit_pretrain.spikes import MeanRule, RollbackPolicy
from tests.support.resumable import Kill

ROWS, BATCH, EPOCHS = 28, 4, 4  # 7 batches in an epoch
DECAY = 0.9  # of an average of weights


def loader(rows: int = ROWS) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, generator=g)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True), torch.arange(rows)), BATCH, shuffle=True)


class Net(pl.LightningModule):
    """Notes the rows of every batch that it is given.

    Args:
        poison: Batches, counted over the run, whose loss is a thousand times what it should be.
        dropout: Probability.
    """

    def __init__(self, poison: list[int] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.poison = poison or []
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        self.seen.append((number, batch[2].tolist()))
        loss = mse_loss(self.layers(batch[0]), batch[1])
        return loss * 1000.0 if number in self.poison else loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler_of(optimizer), "interval": "epoch"}}

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


class Seed(pl.Callback):
    """The random state with which the first epoch begins, whatever was drawn while the trainer was made."""

    order = 999

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 0:
            torch.manual_seed(5)


def train(
    folder: str,
    *,
    poison: list[int],
    dropout: float = 0.0,
    accumulation: int = 1,
    rows: int = ROWS,
    kill: tuple[str, int] | None = None,
    save_every: int | None = None,
    extra: list[Any] | None = None,
    kind: type[Net] = Net,
    data: Callable[[], Any] | None = None,
    held: Any = None,
    **rollback: Any,
) -> dict[str, Any]:
    """Train in ``folder``, from its newest checkpoint if there is one; give what has to be equal, and the ledger."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rule = MeanRule(factor=8.0, window=10, min_steps=2)
    settings = {"detector": rule, "every_n_steps": 4, "policy": RollbackPolicy(distance=3, max_rollbacks=9)}
    back = LossSpikeRollback(**(settings | rollback))
    saver = ModelCheckpoint(
        Path(folder) / "saved", "{step:05d}", every_n_train_steps=save_every or 10**6, save_top_k=-1
    )
    callbacks = [*(extra or []), back, Seed(), ExactResume(), saver, *([] if kill is None else [Kill(*kill)])]
    saved = sorted((Path(folder) / "saved").glob("*.ckpt"))
    if saved:
        torch.manual_seed(77)
    net = kind(poison, dropout)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulation,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader(rows) if data is None else data(), held, ckpt_path=saved[-1] if saved else None)
    return {
        **outcome(net, trainer.optimizers[0]),
        "seen": net.seen,
        "ledger": [(e.step, e.low, e.high) for e in back.ledger.entries],
        "step": trainer.global_step,
    }


def outcome(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, the learning rate, and the numbers that come next."""
    return {
        "weights": [p.detach().numpy().tobytes() for p in net.parameters()],
        "rate": optimizer.param_groups[0]["lr"],
        "random": torch.get_rng_state().numpy().tobytes(),
    }


def never_saw(
    ledger: list[tuple[int, int, int]],
    *,
    dropout: float = 0.0,
    accumulation: int = 1,
    rows: int = ROWS,
    averages: Callable[[int | None, int | None], bool] | None = None,
    kind: type[Net] = Net,
    update: Callable[[Any, torch.optim.Optimizer, list[Any]], None] | None = None,
    data: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """A loop of torch that reads the windows ``low`` to ``high`` of every entry and does nothing with them.

    Args:
        averages: Whether an average of the weights, which are then its end, takes in the step or the epoch just done.
        update: Made of every window; None is the ordinary one.
    """
    net = kind(dropout=dropout)
    optimizer = net.optimizer()
    scheduler = scheduler_of(optimizer)
    average = AveragedModel(net.layers, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    source = loader(rows) if data is None else data()
    position, orders, done = 0, [], 0
    for epoch in range(EPOCHS):
        batches = iter(source)
        if epoch == 0:
            torch.manual_seed(5)
        orders.append(order := list[int]())
        for window in _windows(batches, accumulation):
            order += [row for batch in window for row in batch[2].tolist()]
            if not any(low <= position < high for _, low, high in ledger):
                if update is not None:
                    update(net, optimizer, window)
                else:
                    optimizer.zero_grad()
                    for batch in window:
                        (mse_loss(net.layers(batch[0]), batch[1]) / accumulation).backward()
                    optimizer.step()
                if averages is not None and averages(done, None):
                    average.update_parameters(net.layers)
                done += 1
            position += 1
        scheduler.step()
        if averages is not None and averages(None, epoch):
            average.update_parameters(net.layers)
    if averages is not None:
        net.layers.load_state_dict(average.module.state_dict())
    return {**outcome(net, optimizer), "orders": orders}


def _windows(batches: Iterator[Any], accumulation: int) -> Iterator[list[Any]]:
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == accumulation:
            yield window
            window = []
    if window:
        yield window
