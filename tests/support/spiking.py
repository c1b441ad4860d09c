"""A small GPT run into which spikes are built: windows of poisoned data, or a weight that is damaged once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lit_pretrain.callbacks import ExactResume, GradientClipping, LossSpikeRollback, RunCheckpoint, RunCounters
from lit_pretrain.callbacks.schedules import WarmupCosine
from lit_pretrain.data import TokenDataModule
from lit_pretrain.module import GPTModule
from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from lit_pretrain.specs import GPTConfig
from lit_pretrain.spikes import MeanRule, RollbackPolicy
from lit_pretrain.strategies import PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy
from tests.support import resumable
from tests.support.resumable import ROWS, UPDATES, T

STRATEGIES: dict[str, Callable[[], Any]] = {
    "zero3": lambda: ZeROStrategy(3),
    "zero1": lambda: ZeROStrategy(1),
    "tp2": lambda: TensorParallelStrategy(2),
    "pp2": lambda: PipelineParallelStrategy(2, num_microbatches=2),
}
RULE = MeanRule(factor=4.0, window=10, min_steps=3)


class PoisonedData(TokenDataModule):
    """Windows whose loss the module blows up.

    Args:
        poison: Data steps.
        scale: Times the loss; NaN for a loss that is not a number.
        overflow: Data steps whose loss is infinite: a loss scaler skips them.
        settings: Of the data module.
    """

    def __init__(
        self, *args: Any, poison: list[int], scale: float = 60.0, overflow: list[int] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.scales = dict.fromkeys(poison, scale) | dict.fromkeys(overflow or [], math.inf)

    def read_train(self, position: int) -> dict[str, Any]:
        batch = super().read_train(position)
        scale = self.scales.get(int(batch["index"]) // self._accumulation(), 1.0)
        return {**batch, "scale": torch.full((len(batch["ids"]),), scale)}


class Poisonable(GPTModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * batch["scale"][0]


class Scheduled(Poisonable):
    """With a scheduler of Lightning's."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Damage(Callback):
    """Every weight of this rank times 30, once: what a fault of the hardware may do."""

    def __init__(self, update: int) -> None:
        self.update, self.done = update, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.update and not self.done:
            self.done = True
            with torch.no_grad():
                for p in pl_module.parameters():
                    (p.to_local() if hasattr(p, "to_local") else p).mul_(30.0)


class CutFrom(Callback):
    """A lower learning rate from one update to another, by the schedule's own means: the oracle of a ledger's cut."""

    order = 0

    def __init__(self, update: int, until: int, factor: float) -> None:
        self.update, self.until, self.factor, self.done = update, until, factor, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.update and not self.done:
            self.done = True
            schedule = next(c for c in trainer.callbacks if isinstance(c, WarmupCosine))
            schedule.cut(self.factor, until_update=self.until)


def run(
    root: str,
    folder: str,
    *,
    poison: list[int] | None = None,
    scale: float = 60.0,
    overflow: list[int] | None = None,
    precision: str | None = None,
    skip: list[list[int]] | None = None,
    rollback: dict[str, Any] | None = None,
    damage: int | None = None,
    extra: list[Any] | None = None,
    saver: Any = None,
    scheduled: bool = False,
    kill: tuple[str, int] | None = None,
    save_every: int | None = None,
    accumulation: int = 2,
    model: dict[str, Any] | None = None,
    strategy: str | None = None,
    replicas: int | None = None,
    ckpt_path: str | None = "newest",
    **settings: Any,
) -> dict[str, Any]:
    """Train; give what has to be equal.

    Args:
        root: Where the shards are.
        folder: Of the run.
        poison: Data steps to poison.
        scale: Times their loss.
        overflow: Data steps whose loss is infinite.
        precision: ``bf16`` or ``fp16``, the latter with a scale that moves within a few updates.
        skip: Data that the data module itself never reads: the oracle, which knows no rollback.
        rollback: Settings of LossSpikeRollback; None leaves it out.
        damage: Update before which the weights are damaged.
        extra: Further callbacks.
        saver: In place of our RunCheckpoint.
        scheduled: A scheduler of Lightning's in place of our schedule.
        kill: Hook and count at which this process kills itself.
        save_every: Updates between checkpoints; None for none but the last.
        accumulation: Microbatches per update.
        model: Settings of the model that differ.
        strategy: Of the trainer; also a key of ``STRATEGIES``.
        replicas: Data-parallel ranks; None for all.
        ckpt_path: ``newest``, a path, or None.
        settings: Of the trainer.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    replicas = world if replicas is None else replicas
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = resumable.newest(folder) if ckpt_path == "newest" else ckpt_path
    resumable.seed(resumed=path is not None)
    data = PoisonedData(
        resumable.corpus(Path(root)),
        sequence_length=T,
        micro_batch_size=ROWS // accumulation // replicas,
        global_batch_size=ROWS,
        poison=poison or [],
        scale=scale,
        overflow=overflow,
        skip=skip or [],
    )
    counters = RunCounters()
    callbacks: list[Any] = [
        RunCheckpoint(every_n_steps=save_every, keep_last=3) if saver is None else saver,
        resumable.Writer(folder),
        resumable.Noise(),
        counters,
        GradientClipping(1.0, non_finite="ignore"),
        ExactResume(),
        *([] if scheduled else [WarmupCosine(warmup_steps=3, total_steps=UPDATES)]),
        *(extra or []),
    ]
    back = None
    if rollback is not None:
        usual = {"detector": RULE, "every_n_steps": 4, "policy": RollbackPolicy(distance=2)}
        back = LossSpikeRollback(**(usual | rollback))
        callbacks.append(back)
    if damage is not None:
        callbacks.append(Damage(damage))
    if kill is not None:
        callbacks.append(resumable.Kill(*kill))
    shape = {"vocab_size": resumable.VOCAB, "block_size": T, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.2}
    module = (Scheduled if scheduled else Poisonable)(GPTConfig(**(shape | (model or {}))), seed=3)
    given = {} if strategy is None else {"strategy": STRATEGIES[strategy]() if strategy in STRATEGIES else strategy}
    if precision is not None:
        scaler = DynamicLossScaler(initial_scale=64, growth_interval=3) if precision == "fp16" else None
        settings["plugins"] = [MasterWeightPrecision(precision, scaler=scaler), *settings.get("plugins", [])]  # type: ignore[arg-type]
    fit = resumable.trainer(folder, callbacks, accumulate_grad_batches=accumulation, **(given | settings))
    fit.fit(module, datamodule=data, ckpt_path=path)
    return {**outcome(fit, module), "tokens": counters.tokens, "updates": counters.updates} | {
        "read": counters.tokens_read,
        "ledger": [] if back is None else [(e.step, e.low, e.high, e.spike) for e in back.ledger.entries],
        "entries": [] if back is None else back.ledger.state_dict(),
        "rollbacks": 0 if back is None else back.rollbacks,
        "stop": None if back is None else back.stop_reason,
    }


def outcome(trainer: Any, module: Any) -> dict[str, Any]:
    """What this rank holds: weights, optimizer states, rates, random states."""

    def local(value: torch.Tensor) -> bytes:
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().cpu().contiguous().numpy().tobytes()

    optimizer = trainer.optimizers[0]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in parameters]
    return {
        "weights": [local(p) for p in module.parameters()],
        "masters": [local(p) for p in parameters],
        "optimizer": [local(v) for state in states for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)],
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "random": resumable.drawn(),
        "step": trainer.global_step,
        "precision": trainer.precision_plugin.state_dict(),
    }


DECIDED = ("weights", "masters", "optimizer", "rates", "random", "step", "precision", "tokens", "updates")
"""What a run that rolled back has in common with one that never saw the data."""


def differing(got: dict[str, Any], want: dict[str, Any], keys: tuple[str, ...] = DECIDED) -> list[str]:
    """Which of them are not equal, to the bit."""
    return [key for key in keys if got[key] != want[key]]


def is_finite(got: dict[str, Any]) -> bool:
    import numpy as np

    return all(math.isfinite(float(np.abs(np.frombuffer(w, np.float32)).max(initial=0.0))) for w in got["weights"])
