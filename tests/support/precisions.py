"""A small module to train in any precision, with overflows where a test wants them, and the same training by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS, HIDDEN, ROWS = 8, 16, 4


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def batches(count: int, *, overflow: Sequence[int] = (), rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Regression batches; ``factor`` is 1, or beyond every type at the batches named."""
    g = torch.Generator().manual_seed(7)
    out = []
    for i in range(count):
        x = torch.randn(rows, INPUTS, generator=g)
        factor = torch.tensor(float("inf") if i in overflow else 1.0)
        out.append({"x": x, "y": x.sum(dim=1, keepdim=True).sin(), "factor": factor})
    return out


class Net(pl.LightningModule):
    """Least squares; the loss is taken in float32."""

    def __init__(
        self, make: Callable[[Any], Any] | None = None, *, batches: list[dict[str, Tensor]], seed: int = 0
    ) -> None:
        super().__init__()
        self.net = network(seed)
        self._make = make or (lambda p: torch.optim.SGD(p, lr=0.1))
        self._batches = batches
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch["x"]).float() - batch["y"]).square().mean() * batch["factor"]
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", (self.net(batch["x"]).float() - batch["y"]).square().mean())

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(self._batches, batch_size=None, shuffle=False)

    def val_dataloader(self) -> Any:
        return DataLoader(self._batches[:1], batch_size=None)


class Look(pl.Callback):
    """What a callback sees before each optimizer step, and what there is after each batch."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in pl_module.parameters()])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])
        self.scales.append(getattr(trainer.precision_plugin, "loss_scale", 1.0))
        self.skipped.append(getattr(trainer.precision_plugin, "last_update_skipped", False))


def trainer(**settings: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**(given | settings))


def by_hand(
    data: list[dict[str, Tensor]],
    kind: str,
    *,
    make: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    scale: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Gradients and weights of every update: float32 masters, a model cast to 16 bits, none of the code under test."""
    masters = network(seed).to(device)
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.1)))(masters.parameters())
    gradients, weights = [], []
    for start in range(0, len(data), accumulate):
        totals = [torch.zeros_like(p) for p in masters.parameters()]
        for batch in data[start : start + accumulate]:
            narrow = copy.deepcopy(masters).to(DTYPES[kind])
            with torch.autocast(device, DTYPES[kind]):
                loss = (narrow(batch["x"].to(device)).float() - batch["y"].to(device)).square().mean()
            (loss / accumulate * scale).backward()
            for total, p in zip(totals, narrow.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad.float()
        for total, p in zip(totals, masters.parameters(), strict=True):
            p.grad = total / scale
        gradients.append([t / scale for t in totals])
        optimizer.step()
        weights.append([p.detach().clone() for p in masters.parameters()])
    return gradients, weights
