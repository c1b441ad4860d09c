"""What LossSpikeRollback costs: ``python -m benchmarks.bench_rollback [--updates 400] [--out FILE]``.

One training of a GPT whose step takes 200 ms or more. Stretches of 25 updates with a snapshot take turns with stretches
without, so that both meet the same machine. Prints the cost of a snapshot every 25 updates as a share of the step, the
time of a recovery in steps, and the memory that snapshots take against what is stated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.__main__ import circumstances
from lit_pretrain.callbacks import GradientClipping, LossSpikeRollback, sort_callbacks
from lit_pretrain.callbacks._moments import Moments
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.spikes import MeanRule

EVERY = 25
VOCABULARY, LENGTH = 2048, 256


class Turns(pl.Callback):
    """Times every update; turns snapshots on and off every 25 updates, and measures one recovery at the end."""

    order = 1000

    def __init__(self) -> None:
        self.with_snapshot: list[list[float]] = []
        self.without: list[list[float]] = []
        self.recovery_s = 0.0
        self._stretch: list[float] = []
        self._began = 0.0

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """One update is over."""
        now = time.perf_counter()
        self._stretch.append(now - self._began)
        self._began = now
        if trainer.global_step % EVERY == 0:
            turn = trainer.global_step // EVERY
            if turn > 2:  # the first ones allocate
                (self.with_snapshot if turn % 2 else self.without).append(self._stretch)
            self._stretch = []


class TakingTurns(Moments):
    """Takes a snapshot at every second chance."""

    def take_if_due(self, trainer: pl.Trainer, *, updates: int, **settings: Any) -> None:
        """At updates 0, 50, 100 ...: the stretches after them carry its cost."""
        if updates % (2 * EVERY) == 0:
            super().take_if_due(trainer, updates=updates, **settings)


def measure(updates: int, *, layers: int, width: int, rows: int) -> dict[str, Any]:
    """The figures of one training.

    Args:
        updates: How many.
        layers: Of the model.
        width: Of the model.
        rows: Sequences per update.
    """
    config = GPTConfig(vocab_size=VOCABULARY, block_size=LENGTH, n_layer=layers, n_head=4, n_embd=width, bias=False)
    ids = torch.randint(VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batches = [{"ids": row[:, :-1], "targets": row[:, 1:]} for row in ids.split(rows)]
    rollback = LossSpikeRollback(MeanRule(), every_n_steps=EVERY, keep=2)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=updates,
            callbacks=sort_callbacks([GradientClipping(1.0, non_finite="ignore"), rollback, turns]),
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        original = LossSpikeRollback.on_train_start

        def start(self: LossSpikeRollback, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            original(self, trainer, module)
            self._moments = TakingTurns(every_n_steps=EVERY, keep=2, path=None)

        LossSpikeRollback.on_train_start = start  # type: ignore[method-assign]
        try:
            recover = Recovery(rollback, at=updates - 1)
            trainer.callbacks.append(recover)  # type: ignore[attr-defined]
            module = GPTModule(config)
            trainer.fit(module, DataLoader(batches, batch_size=None))
        finally:
            LossSpikeRollback.on_train_start = original  # type: ignore[method-assign]
    step = statistics.median(t for stretch in turns.without for t in stretch)
    on = statistics.median(statistics.fmean(s) for s in turns.with_snapshot)
    off = statistics.median(statistics.fmean(s) for s in turns.without)
    parameters = sum(p.numel() for p in module.parameters())
    return {
        "parameters": parameters,
        "step_ms": 1e3 * step,
        "stretches": [len(turns.with_snapshot), len(turns.without)],
        "with_ms": 1e3 * on,
        "without_ms": 1e3 * off,
        "cost_share": on / off - 1.0,
        "snapshot_step_ms": 1e3 * statistics.median(s[0] for s in turns.with_snapshot),
        "recovery_ms": 1e3 * recover.seconds,
        "recovery_steps": recover.seconds / step,
        "snapshot_mib": recover.bytes / 2 / 2**20,
        "stated_mib": 3 * 4 * parameters / 2**20,
    }


class Recovery(pl.Callback):
    """Times going back once."""

    def __init__(self, rollback: LossSpikeRollback, *, at: int) -> None:
        self.rollback, self.at = rollback, at
        self.seconds, self.bytes = 0.0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restore the newest snapshot, and leave the run there."""
        moments = self.rollback._moments
        if trainer.global_step == self.at and moments is not None and not self.seconds:
            self.bytes = moments.size
            began = time.perf_counter()
            moments.go_back(trainer, moments.points()[-1])
            self.seconds = time.perf_counter() - began
            trainer.should_stop = True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    figures = measure(a.updates, layers=a.layers, width=a.width, rows=a.rows)
    for name, value in figures.items():
        print(f"{name:<18}{value if not isinstance(value, float) else format(value, '.4g')}")
    if a.out is not None:
        a.out.write_text(json.dumps({**circumstances(), "rollback": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
