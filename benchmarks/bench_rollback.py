"""What LossSpikeRollback costs: ``python -m benchmarks.bench_rollback [--pairs 80] [--stretch 10] [--out FILE]``.

One training of a GPT whose step takes 200 ms or more, cut into stretches of a few updates. They come in pairs: one
begins with a snapshot and the other does not, in random order, so that both meet the same machine. What a snapshot
costs is the mean difference of the sums of a pair; its share is that cost over 25 updates without one. The interval is
a bootstrap over pairs. A stretch has to hold all that a snapshot does to the run: its copy is over before the weights
change in the first update, and the other updates are there for what it does to caches and threads.

Beside it the parts, measured directly: the time that the caller is held while a snapshot is taken and while it waits
for the copy, and what the first update of a stretch takes longer beyond that, while the copy runs in the background.
At the end the time of a recovery in steps, and the memory that snapshots take against what is stated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.__main__ import circumstances
from lit_pretrain.callbacks import GradientClipping, LossSpikeRollback, sort_callbacks
from lit_pretrain.callbacks._rollback.moments import Moments
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.spikes import MeanRule

EVERY = 25  # updates between snapshots, as the callback does by default
KEEP = 2
WARMUP = 4  # stretches; the first ones allocate
VOCABULARY, LENGTH = 2048, 256


def in_pairs(pairs: int, *, seed: int) -> list[bool]:
    """Which stretches begin with a snapshot: the warmup's, then one of each pair."""
    first = np.random.default_rng(seed).random(pairs) < 0.5
    return [True] * WARMUP + [turn for one in first.tolist() for turn in (one, not one)]


class TakingTurns(Moments):
    """Takes a snapshot where the plan says so, and times how long that holds the caller."""

    def __init__(self, plan: Sequence[bool], *, stretch: int) -> None:
        super().__init__(every_n_steps=stretch, keep=KEEP, path=None)
        self.plan, self.stretch = plan, stretch
        self.held: list[float] = []
        self.waited: list[float] = []
        self._is_copying = False

    def take_if_due(self, trainer: pl.Trainer, *, updates: int, **settings: Any) -> None:
        """At the start of a stretch."""
        turn, place = divmod(updates, self.stretch)
        if place == 0 and turn < len(self.plan) and self.plan[turn]:
            began = time.perf_counter()
            super().take_if_due(trainer, updates=updates, **settings)
            self.held.append(time.perf_counter() - began)
            self._is_copying = True

    def wait(self) -> None:
        """Before the weights change."""
        began = time.perf_counter()
        super().wait()
        if self._is_copying:
            self.waited.append(time.perf_counter() - began)
            self._is_copying = False


class Measured(LossSpikeRollback):
    """With snapshots that take turns."""

    def __init__(self, plan: Sequence[bool], *, stretch: int) -> None:
        super().__init__(MeanRule(), every_n_steps=stretch, keep=KEEP)
        self.turns = TakingTurns(plan, stretch=stretch)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of the usual ones."""
        super().on_train_start(trainer, pl_module)
        self._moments = self.turns


class Stopwatch(pl.Callback):
    """Times every update, and one recovery after the last."""

    order = 1000

    def __init__(self, turns: TakingTurns, *, updates: int) -> None:
        self.turns, self.updates = turns, updates
        self.seconds: list[float] = []
        self.recovery_s, self.bytes = 0.0, 0
        self._began = 0.0

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """One update is over."""
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now
        if trainer.global_step == self.updates:
            self.bytes = self.turns.size
            began = time.perf_counter()
            self.turns.go_back(trainer, self.turns.points()[-1])
            self.recovery_s = time.perf_counter() - began
            trainer.should_stop = True


def interval(values: np.ndarray, *, resamples: int = 10_000) -> list[float]:
    """95% of the means that resampled values have."""
    chosen = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return [float(x) for x in np.quantile(values[chosen].mean(axis=1), [0.025, 0.975])]


def figures_of(
    seconds: Sequence[float], held: Sequence[float], waited: Sequence[float], plan: Sequence[bool], *, stretch: int
) -> dict[str, Any]:
    """The cost of a snapshot.

    Args:
        seconds: Of every update.
        held: How long each snapshot held the caller when it was taken.
        waited: And before the optimizer's step.
        plan: Which stretches began with one.
        stretch: Updates in each.
    """
    times = np.asarray(seconds[: len(plan) * stretch]).reshape(len(plan), stretch)[WARMUP:]
    on = np.asarray(plan[WARMUP:])
    with_s, without_s = times[on], times[~on]  # one of each pair, in the order of pairs
    cost = (with_s - without_s).sum(axis=1)
    first = (with_s - without_s)[:, 0]
    mine = np.asarray(held[WARMUP:]) + np.asarray(waited[WARMUP:])
    step = float(without_s.mean())
    share = [x / (EVERY * step) for x in (float(cost.mean()), *interval(cost))]
    direct = [x / (EVERY * step) for x in (float(first.mean()), *interval(first))]
    return {
        "pairs": len(cost),
        "stretch": stretch,
        "step_ms": 1e3 * step,
        "step_median_ms": 1e3 * statistics.median(without_s.flatten().tolist()),
        "snapshot_ms": 1e3 * float(cost.mean()),
        "snapshot_ms_95": [1e3 * x for x in interval(cost)],
        "cost_share": share[0],
        "cost_share_95": share[1:],
        "held_ms": 1e3 * float(np.mean(held[WARMUP:])),
        "waited_ms": 1e3 * float(np.mean(waited[WARMUP:])),
        "slower_ms": 1e3 * float((first - mine).mean()),
        "slower_ms_95": [1e3 * x for x in interval(first - mine)],
        "direct_share": direct[0],
        "direct_share_95": direct[1:],
    }


def measure(pairs: int, *, stretch: int, layers: int, width: int, rows: int) -> dict[str, Any]:
    """The figures of one training.

    Args:
        pairs: Of stretches.
        stretch: Updates in each.
        layers: Of the model.
        width: Of the model.
        rows: Sequences per update.
    """
    config = GPTConfig(vocab_size=VOCABULARY, block_size=LENGTH, n_layer=layers, n_head=4, n_embd=width, bias=False)
    ids = torch.randint(VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batches = [{"ids": row[:, :-1], "targets": row[:, 1:]} for row in ids.split(rows)]
    plan = in_pairs(pairs, seed=0)
    updates = len(plan) * stretch
    rollback = Measured(plan, stretch=stretch)
    watch = Stopwatch(rollback.turns, updates=updates)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=updates,
            max_epochs=-1,
            callbacks=sort_callbacks([GradientClipping(1.0, non_finite="ignore"), rollback, watch]),
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = GPTModule(config)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    parameters = sum(p.numel() for p in module.parameters())
    found = figures_of(watch.seconds, rollback.turns.held, rollback.turns.waited, plan, stretch=stretch)
    return {
        "parameters": parameters,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        **found,
        "recovery_ms": 1e3 * watch.recovery_s,
        "recovery_steps": 1e3 * watch.recovery_s / found["step_ms"],
        "snapshot_mib": watch.bytes / KEEP / 2**20,
        "stated_mib": 3 * 4 * parameters / 2**20,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--stretch", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    figures = measure(a.pairs, stretch=a.stretch, layers=a.layers, width=a.width, rows=a.rows)
    for name, value in figures.items():
        shown = [
            format(x, ".4g") if isinstance(x, float) else str(x)
            for x in (value if isinstance(value, list) else [value])
        ]
        print(f"{name:<18}{' to '.join(shown)}")
    if a.out is not None:
        a.out.write_text(json.dumps({**circumstances(), "rollback": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
