"""A small GPT trained in any precision under any layout, and how far 16 bits may take it from float32."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import SGD

from lit_pretrain.distributed import state
from lit_pretrain.module import GPTModule
from lit_pretrain.plugins import MasterWeightPrecision
from lit_pretrain.strategies import HybridParallelStrategy, MeshStrategy
from tests.support.parity import SEQUENCE, Slices, config

LAYERS, ROWS, RATE = 2, 8, 0.03
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half an eps: the greatest relative error of one rounding


class Rule(Slices):
    """Every token follows from the one before it, so that there is something to learn, and smoothly."""

    def __init__(self, *, updates: int, rows: int, accumulate: int) -> None:
        super().__init__(updates=updates, rows=rows, accumulate=accumulate)
        for batch in self.batches:
            ids = [batch["ids"][:, 0] % 8]
            for _ in range(batch["ids"].shape[1]):
                ids.append((3 * ids[-1] + 1) % 8)
            tokens = torch.stack(ids, dim=1)
            batch["ids"] = tokens[:, :-1].contiguous()
            batch["targets"] = torch.where(batch["targets"] == -100, -100, tokens[:, 1:])


class Watch(pl.Callback):
    """Losses, norms, scales and skips of every update; and an overflow on one rank where a test wants it."""

    def __init__(self, *, overflow: int | None = None, rank: int | None = None) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.before: dict[str, torch.Tensor] = {}
        self.unchanged: bool | None = None
        self._overflow, self._rank = overflow, rank

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step != self._overflow:
            return
        self.before = whole(pl_module)
        if trainer.global_rank == self._rank:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            state.local(gradient).flatten()[:1] = float("inf")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(trainer.strategy, MeshStrategy):
            self.norms.append(trainer.strategy.global_grad_norm(parameters).item())
        else:
            self.norms.append(torch.cat([p.grad.flatten() for p in parameters]).norm().item())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        if trainer.global_step - 1 == self._overflow:
            now = whole(pl_module)
            self.unchanged = all(torch.equal(now[name], self.before[name]) for name in now)
        if trainer.global_step > len(self.losses):
            self.losses.append(trainer.callback_metrics["train/loss"].item())
            self.scales.append(getattr(plugin, "loss_scale", 1.0))
            if getattr(plugin, "last_update_skipped", False):
                self.skipped.append(trainer.global_step - 1)


def whole(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: state.whole(p).cpu() for name, p in module.named_parameters()}  # type: ignore[misc]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    # Adam would turn rounding errors of gradients that are truly zero into whole steps.
    return SGD(model.parameters(), lr=RATE, foreach=False)


def train(
    layout: Any,
    kind: Any,
    *,
    updates: int,
    devices: int = 1,
    overflow: tuple[int, int] | None = None,
    accumulate: int = 1,
    keep_fp32: tuple[str, ...] = (),
    reduce_in: Any = "fp32",
    style: str = "gpt2",
    clip: float | None = None,
    accelerator: str = "cpu",
    flag: Any = None,
    compile: bool = False,
) -> dict[str, Any]:
    """Train; every rank calls it and gets whole weights.

    Args:
        layout: ``auto``, ``ddp`` or the settings of a HybridParallelStrategy.
        kind: ``bf16``, ``fp16`` or ``fp32``.
        updates: Of the optimizer.
        devices: Ranks.
        overflow: Update and rank of an inf in one gradient.
        accumulate: Microbatches per update.
        keep_fp32: Of the plugin.
        reduce_in: Of the plugin.
        style: Of the model.
        clip: Greatest norm.
        accelerator: ``cpu`` or ``gpu``.
        flag: ``Trainer(precision=...)``, in place of the plugin and of ``kind``.
        compile: The module's blocks.
    """
    strategy = HybridParallelStrategy(**layout) if isinstance(layout, dict) else layout
    watch = Watch(overflow=overflow[0] if overflow else None, rank=overflow[1] if overflow else None)
    module = GPTModule(config(style, tied=True, layers=LAYERS), optimizer=sgd, seed=5, compile=compile)
    plugin = MasterWeightPrecision(kind, keep_fp32=keep_fp32, reduce_in=reduce_in) if flag is None else None
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=flag,
        plugins=plugin,
        max_epochs=1,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=50,
        callbacks=[watch],
    )
    trainer.fit(module, datamodule=Rule(updates=updates, rows=ROWS, accumulate=accumulate))
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "scales": watch.scales,
        "skipped": watch.skipped,
        "unchanged": watch.unchanged,
        "weights": whole(module),
        "plugin": repr(trainer.precision_plugin),
        "figures": {k: float(v) for k, v in trainer.logged_metrics.items() if k.startswith("precision/")},
    }


def roundings(*, parts: int = 1) -> int:
    """Roundings on the longest way from a weight to the loss and back.

    A block rounds the outputs of 2 norms, 6 matrix products, attention, the activation and 2 residual sums: 12; the
    embedding, its sum with the positions, the final norm and the logits: 4; the backward pass as many again. A sum
    that is cut into ``parts`` is rounded once for each part and once for each addition: 2 parts - 1 times.
    """
    return 2 * (12 * LAYERS + 4) * (2 * parts - 1)


def relative_error(kind: str, *, parts: int = 1) -> float:
    """Of a gradient and of a token's loss: three standard deviations.

    One rounding is off by at most the roundoff ``u`` either way, evenly, so with a deviation of ``u / sqrt(3)``;
    independent ones add up as the root of their number.
    """
    return 3 * ROUNDOFF[kind] / math.sqrt(3) * math.sqrt(roundings(parts=parts))


def weight_bound(error: float, norms: list[float]) -> float:
    """How far weights drift: each update, of length ``rate |g|``, is off by that share, independently of the others."""
    return error * RATE * math.sqrt(sum(norm**2 for norm in norms))


def loss_bounds(error: float, losses: list[float], norms: list[float]) -> list[float]:
    """Of each update: its own error, less for being a mean over targets, and what the drift so far makes of it."""
    out = []
    targets = ROWS * SEQUENCE / 2  # at least: up to half of a row is masked
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        out.append(error * loss / math.sqrt(targets) + norm * weight_bound(error, norms[:i]))
    return out


def compare(got: dict[str, Any], want: dict[str, Any], *, error: float) -> tuple[float, float]:
    """Greatest share of the bounds that losses and weights use; at most 1.

    Args:
        got: In 16 bits.
        want: What it has to be near to; its losses and norms are those of the bounds.
        error: Relative, of both together.
    """
    bounds = loss_bounds(error, want["losses"], want["norms"])
    loss = max(abs(a - b) / bound for a, b, bound in zip(got["losses"], want["losses"], bounds, strict=True))
    squares = sum(float((got["weights"][n].double() - w.double()).square().sum()) for n, w in want["weights"].items())
    return loss, math.sqrt(squares) / weight_bound(error, want["norms"])
