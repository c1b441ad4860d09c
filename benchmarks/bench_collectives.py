"""Collectives of one training step, counted as they are called, against theory.

``python -m benchmarks.bench_collectives`` trains a small GPT on 2 ranks and exits with 1 where a count or a number of
elements or bytes is not the one expected. n is the number of parameters, U of units (layers), m of microbatches that
make an update:

* ZeRO-0 (as DDP): every gradient reduced once, n elements in U + 1 all-reduces; on a ring that moves 2n.
* ZeRO-1: n gathered and n reduced to shards in an update: the 2n of an all-reduce, cut in two.
* ZeRO-2: n gathered once in an update, since gathered parameters are kept until it, and n reduced m times.
* ZeRO-3: layers gathered for forward and again for backward, everything reduced to shards: 3n m, less a gather of the
  root, which is wanted again at once.
* Bytes: 4 an element in float32; in 16-bit training parameters are gathered in 2 and gradients reduced in 4.
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
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operation."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes by next
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in KINDS:
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            whole = max(tensors, key=Tensor.numel)
            if whole.numel() > SMALL:
                self.calls[KINDS[name]] += 1
                self.elements[KINDS[name]] += whole.numel()
                self.bytes[KINDS[name]] += whole.nbytes
        return result


class Count(pl.Callback):
    """Counts the second update, from the forward pass of its first microbatch on.

    Args:
        microbatches: Of an update.
    """

    def __init__(self, microbatches: int) -> None:
        self.seen, self.microbatches = Collectives(), microbatches

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        if batch_idx == self.microbatches:
            self.seen.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End."""
        if batch_idx == 2 * self.microbatches - 1:
            self.seen.__exit__(None, None, None)


def measure(settings: dict[str, Any], layers: int, microbatches: int = 1) -> dict[str, Any]:
    """What one rank calls in an update, and the sizes of its model."""
    module = GPTModule(GPTConfig(n_layer=layers, **SHAPE))  # type: ignore[arg-type]
    count = Count(microbatches)
    numel = sum(p.numel() for p in module.parameters())
    blocks = sum(p.numel() for p in module.model.blocks.parameters())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=HybridParallelStrategy(**settings),
        max_steps=2,
        accumulate_grad_batches=microbatches,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[count],
    )
    ids = torch.zeros(ROWS, SHAPE["block_size"], dtype=torch.int64)
    trainer.fit(
        module, torch.utils.data.DataLoader([{"ids": ids, "targets": ids}] * (2 * microbatches), batch_size=None)
    )
    return {
        "calls": dict(count.seen.calls),
        "elements": dict(count.seen.elements),
        "bytes": dict(count.seen.bytes),
        "parameters": numel,
        "in_blocks": blocks,
    }


Expected = dict[str, tuple[int, int, int]]
"""Calls, elements and bytes of an element, by kind of collective."""


def expected_zero(stage: int, *, layers: int, numel: int, blocks: int, microbatches: int, narrow: bool) -> Expected:
    """What ZeRO does in an update."""
    units, wide = layers + 1, 4
    if stage == 0:
        return {"all-reduce": (units, numel, wide)}
    gathers = (microbatches * (units + layers), microbatches * (numel + blocks)) if stage == 3 else (units, numel)
    reduces = 1 if stage == 1 else microbatches
    return {
        "all-gather": (*gathers, 2 if narrow else wide),
        "reduce-scatter": (reduces * units, reduces * numel, wide),
    }


def expected_layer(*, sequence_parallel: bool) -> Expected:
    """What tensor parallelism does in one layer."""
    stream, width = ROWS * int(SHAPE["block_size"]) * int(SHAPE["n_embd"]), int(SHAPE["n_embd"])
    if not sequence_parallel:
        return {"all-reduce": (4, 4 * stream, 4)}
    pairs = dict.fromkeys(("all-gather", "reduce-scatter"), (4, 4 * stream, 4))
    return {**pairs, "all-reduce": (4, 4 * width, 4)}


def run() -> list[dict[str, Any]]:
    """A row per layout."""
    rows = []
    pool = RankPool()
    try:
        for stage, microbatches, narrow in [
            *((stage, microbatches, False) for stage in range(4) for microbatches in (1, 3)),
            (2, 3, True),
            (3, 1, True),
        ]:
            settings: dict[str, Any] = {"stage": stage, "precision": "bf16" if narrow else None}
            found = pool(WORLD, measure, settings, 3, microbatches)[0]
            sizes = {"numel": found["parameters"], "blocks": found["in_blocks"]}
            expected = expected_zero(stage, layers=3, microbatches=microbatches, narrow=narrow, **sizes)
            name = f"zero{stage}{', bf16' if narrow else ''}, of {microbatches}"
            rows.append(_row(name, found, expected, padding=True))
        for sequence_parallel in (False, True):
            settings = {"tensor_parallel_size": WORLD, "sequence_parallel": sequence_parallel}
            two, four = (pool(WORLD, measure, settings, layers)[0] for layers in (2, 4))
            found = {kind: _half_difference(two[kind], four[kind]) for kind in ("calls", "elements", "bytes")}
            name = f"tp2 {'sequence, ' if sequence_parallel else ''}a layer"
            rows.append(_row(name, found, expected_layer(sequence_parallel=sequence_parallel), padding=False))
    finally:
        pool.close()
    return rows


def _half_difference(two: dict[str, int], four: dict[str, int]) -> dict[str, float]:
    return {kind: (four[kind] - two.get(kind, 0)) / 2 for kind in four if four[kind] != two.get(kind, 0)}


def _row(name: str, found: dict[str, Any], expected: Expected, *, padding: bool) -> dict[str, Any]:
    # Shards are equal, so an uneven dimension is padded: some elements more than there are parameters.
    room = 0.02 if padding else 0.0
    same = found["calls"] == {kind: calls for kind, (calls, _, _) in expected.items()}
    near = all(
        0 <= found["elements"].get(kind, 0) / numel - 1 <= room
        and found["bytes"].get(kind, 0) == size * found["elements"].get(kind, 0)
        for kind, (_, numel, size) in expected.items()
    )
    return {
        "layout": name,
        **{key: found[key] for key in ("calls", "elements", "bytes")},
        "expected_calls": {kind: calls for kind, (calls, _, _) in expected.items()},
        "expected_elements": {kind: numel for kind, (_, numel, _) in expected.items()},
        "expected_bytes": {kind: numel * size for kind, (_, numel, size) in expected.items()},
        "ok": same and near,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
    keys = ("calls", "elements", "bytes")
    lines = [f"{'layout':<22}{'collective':<16}" + "".join(f"{key:>12}{'theory':>12}" for key in keys)]
    for row in rows:
        for kind in sorted({*row["calls"], *row["expected_calls"]}):
            figures = [row[f"{which}{key}"].get(kind, 0) for key in keys for which in ("", "expected_")]
            text = "".join(f"{figure:>12,.0f}" for figure in figures)
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
