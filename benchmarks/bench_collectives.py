"""Collectives of one training step, counted as they are called, against theory.

``python -m benchmarks.bench_collectives`` trains a small GPT in float32 on 2 ranks and exits with 1 where a count or a
number of elements is not the one expected. n is the number of parameters, U of units (layers):

* ZeRO-0 (as DDP): every gradient reduced once, n elements in U + 1 all-reduces; on a ring that moves 2n.
* ZeRO-1 and 2: n gathered, n reduced to shards: the 2n of an all-reduce, cut in two.
* ZeRO-3: layers gathered for forward and again for backward, everything reduced to shards: 3n, less one gather of the
  root, which is wanted again at once.
* Tensor parallelism: 4 all-reduces of (B, T, C) a layer; with sequence parallelism each is a reduce-scatter and an
  all-gather instead, and the gradients of both norms (weight and bias) are added up over the pieces of the sequence.
  Told from the difference between a model of 4 layers and one of 2.

Source: Rajbhandari et al. 2020, section 7; Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.__main__ import circumstances
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support.ranks import RankPool

WORLD, ROWS = 2, 2
SHAPE = {"vocab_size": 64, "block_size": 16, "n_head": 2, "n_embd": 32, "vocab_multiple": 1}
KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
SMALL = 8  # elements: sums of losses and counts are no traffic of the layout


class Collectives(TorchDispatchMode):
    """Counts calls, and elements of the whole tensor that each is about."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operation."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes by next
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in KINDS:
            found = [t.numel() for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            if max(found) > SMALL:
                self.calls[KINDS[name]] += 1
                self.elements[KINDS[name]] += max(found)
        return result


class Count(pl.Callback):
    """Counts the second step, forward, backward and update."""

    def __init__(self) -> None:
        self.seen = Collectives()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        if batch_idx == 1:
            self.seen.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End."""
        if batch_idx == 1:
            self.seen.__exit__(None, None, None)


def measure(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """What one rank calls in a step, and the sizes of its model."""
    module, count = GPTModule(GPTConfig(n_layer=layers, **SHAPE)), Count()  # type: ignore[arg-type]
    numel = sum(p.numel() for p in module.parameters())
    blocks = sum(p.numel() for p in module.model.blocks.parameters())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=HybridParallelStrategy(**settings),
        max_steps=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[count],
    )
    ids = torch.zeros(ROWS, SHAPE["block_size"], dtype=torch.int64)
    trainer.fit(module, torch.utils.data.DataLoader([{"ids": ids, "targets": ids}] * 2, batch_size=None))
    return {
        "calls": dict(count.seen.calls),
        "elements": dict(count.seen.elements),
        "parameters": numel,
        "in_blocks": blocks,
    }


def expected_zero(stage: int, *, layers: int, numel: int, blocks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and elements of ZeRO in one step."""
    units = layers + 1
    if stage == 0:
        return {"all-reduce": units}, {"all-reduce": numel}
    again = layers if stage == 3 else 0
    calls = {"all-gather": units + again, "reduce-scatter": units}
    return calls, {"all-gather": numel + (blocks if stage == 3 else 0), "reduce-scatter": numel}


def expected_layer(*, sequence_parallel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and elements of tensor parallelism in one layer."""
    stream, width = ROWS * int(SHAPE["block_size"]) * int(SHAPE["n_embd"]), int(SHAPE["n_embd"])
    if not sequence_parallel:
        return {"all-reduce": 4}, {"all-reduce": 4 * stream}
    calls = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 4)
    return calls, {"all-gather": 4 * stream, "reduce-scatter": 4 * stream, "all-reduce": 4 * width}


def run() -> list[dict[str, Any]]:
    """A row per layout."""
    rows = []
    pool = RankPool()
    try:
        for stage in range(4):
            found = pool(WORLD, measure, {"stage": stage}, 3)[0]
            sizes = {"numel": found["parameters"], "blocks": found["in_blocks"]}
            rows.append(_row(f"zero{stage}", found, expected_zero(stage, layers=3, **sizes), padding=True))
        for sequence_parallel in (False, True):
            settings = {"tensor_parallel_size": WORLD, "sequence_parallel": sequence_parallel}
            two, four = (pool(WORLD, measure, settings, layers)[0] for layers in (2, 4))
            found = {kind: _half_difference(two[kind], four[kind]) for kind in ("calls", "elements")}
            name = f"tp2 {'sequence, ' if sequence_parallel else ''}a layer"
            rows.append(_row(name, found, expected_layer(sequence_parallel=sequence_parallel), padding=False))
    finally:
        pool.close()
    return rows


def _half_difference(two: dict[str, int], four: dict[str, int]) -> dict[str, float]:
    return {kind: (four[kind] - two.get(kind, 0)) / 2 for kind in four if four[kind] != two.get(kind, 0)}


def _row(name: str, found: dict[str, Any], expected: tuple[Any, Any], *, padding: bool) -> dict[str, Any]:
    calls, elements = expected
    # Shards are equal, so an uneven dimension is padded: some elements more than there are parameters.
    near = all(0 <= found["elements"].get(k, 0) / n - 1 <= (0.02 if padding else 0.0) for k, n in elements.items())
    same = found["calls"] == calls and found["elements"].keys() == elements.keys()
    return {
        "layout": name,
        "calls": found["calls"],
        "expected_calls": calls,
        "elements": found["elements"],
        "expected_elements": elements,
        "ok": same and near,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
    lines = [f"{'layout':<22}{'collective':<16}{'calls':>7}{'theory':>8}{'elements':>12}{'theory':>12}"]
    for row in rows:
        for kind in sorted({*row["calls"], *row["expected_calls"]}):
            figures = [row[key].get(kind, 0) for key in ("calls", "expected_calls", "elements", "expected_elements")]
            text = f"{figures[0]:>7g}{figures[1]:>8}{figures[2]:>12,.0f}{figures[3]:>12,}"
            lines.append(f"{row['layout']:<22}{kind:<16}{text}{'' if row['ok'] else '  MISSED'}")
    return "\n".join(lines)


def main() -> int:
    """Count, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_collectives", description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = run()
    print(table(rows))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**circumstances(), "rows": rows}, indent=2) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    from benchmarks import bench_collectives  # rank processes look for `measure` by the module's real name

    sys.exit(bench_collectives.main())
