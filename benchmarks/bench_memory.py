"""Bytes per rank of what a layout keeps of a model, at named instants, against closed forms.

``python -m benchmarks.bench_memory`` trains a small GPT in bf16-mixed on 2 ranks under every layout, adds up the
storages of all tensors that are alive besides activations, and exits with 1 where a figure is more than 5% from theory.

Per parameter and N ranks: FP32 master 4, FP32 gradient 4, two moments 8, gathered working copy 2 (bytes). ``in a
window`` is after the backward pass of a microbatch that no update follows, ``before an update`` after the last one. The
ZeRO paper, with gradients in 16 bits and no accumulation in FP32, has 2 + 2 + 12 and is printed beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.__main__ import circumstances
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support.ranks import RankPool

TOLERANCE = 0.05
WORLD = 2
CONFIG = {"vocab_size": 1024, "block_size": 32, "n_layer": 6, "n_head": 4, "n_embd": 192, "vocab_multiple": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "cp2": {"context_parallel_size": 2},
}
INSTANTS = ("in a window", "before an update", "between updates")


def alive() -> int:
    """Bytes of all storages that Python reaches through tensors; what autograd holds is not among them."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            inner = getattr(thing, "_local_tensor", thing)
            if inner.device.type != "meta":
                storage = inner.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


class Instants(pl.Callback):
    """Adds up at each instant of the third update, when optimizer states are there."""

    def __init__(self, before: int) -> None:
        self.before, self.bytes = before, dict.fromkeys(INSTANTS, 0)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Of either microbatch."""
        if trainer.global_step == 2:
            last = trainer.fit_loop.epoch_loop.batch_idx % 2 == 1
            self.bytes["before an update" if last else "in a window"] = alive() - self.before

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After the third update."""
        if trainer.global_step == 3:
            self.bytes["between updates"] = alive() - self.before


def measure(settings: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Bytes at each instant, and the parameters that this rank holds of its stage and its matrices."""
    before = alive()
    instants = Instants(before)
    module = GPTModule(GPTConfig(**CONFIG))  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=HybridParallelStrategy(**settings),
        precision="bf16-mixed",
        max_steps=3,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[instants],
    )
    ids = torch.randint(CONFIG["vocab_size"], (2, CONFIG["block_size"]), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "targets": ids}
    trainer.fit(module, torch.utils.data.DataLoader([batch] * 6, batch_size=None))
    size = settings.get("tensor_parallel_size", 1)
    # A tensor-parallel rank has its share of every matrix, and all of what is no matrix and not split.
    numel = sum(p.numel() // (size if _is_split(name, size) else 1) for name, p in module.named_parameters())
    return instants.bytes, numel


def _is_split(name: str, size: int) -> bool:
    layer = name.split(".")[-2]
    column = layer in ("q_proj", "k_proj", "v_proj", "up_proj")
    return size > 1 and (column or layer == "wte" or (layer in ("o_proj", "down_proj") and name.endswith("weight")))


def theory(layout: str, instant: str, numel: int) -> float:
    """Bytes in closed form.

    Args:
        layout: Of ``LAYOUTS``.
        instant: Of ``INSTANTS``.
        numel: Parameters of this rank before they are sharded over data- or context-parallel ranks.
    """
    stage = int(layout[4]) if layout.startswith("zero") else 1
    sharded = {"zero0": 1, "tp2": 1, "pp2": 1}.get(layout, WORLD)
    states = 12 / sharded  # master and moments
    gradients = 4 if stage in (0, 1) and instant == "in a window" else 4 / sharded
    gathered = 2 if stage in (1, 2) and instant == "in a window" else 0
    return numel * (states + gradients + gathered)


def paper(layout: str) -> float | None:
    """Bytes per parameter in the ZeRO paper, section 3 and figure 1."""
    return {"zero0": 16.0, "zero1": 4 + 12 / WORLD, "zero2": 2 + 14 / WORLD, "zero3": 16 / WORLD}.get(layout)


def run() -> list[dict[str, Any]]:
    """A row per layout and instant; the rank furthest from theory."""
    rows = []
    pool = RankPool()
    try:
        for layout, settings in LAYOUTS.items():
            results = pool(WORLD, measure, settings, timeout_s=300.0)
            for instant in INSTANTS:
                figures = [(found[instant], theory(layout, instant, numel), numel) for found, numel in results]
                got, want, numel = max(figures, key=lambda f: abs(f[0] / f[1] - 1))
                rows.append(
                    {
                        "layout": layout,
                        "instant": instant,
                        "bytes": got,
                        "theory": want,
                        "per_parameter": got / numel,
                        "off": got / want - 1,
                        "paper": paper(layout),
                    }
                )
    finally:
        pool.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
    lines = [f"{'layout':<8}{'instant':<18}{'bytes':>12}{'theory':>12}{'off':>8}{'a parameter':>13}{'paper':>7}"]
    for row in rows:
        other = f"{row['paper']:.1f}" if row["paper"] else ""
        figures = (
            f"{row['bytes']:>12,}{row['theory']:>12,.0f}{row['off']:>+8.1%}{row['per_parameter']:>13.2f}{other:>7}"
        )
        lines.append(f"{row['layout']:<8}{row['instant']:<18}{figures}{'' if fits(row) else '  MISSED'}")
    return "\n".join(lines)


def fits(row: dict[str, Any]) -> bool:
    """Whether a figure is near enough to theory."""
    return abs(float(row["off"])) <= TOLERANCE


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = run()
    print(table(rows))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**circumstances(), "rows": rows}, indent=2) + "\n")
    return 0 if all(map(fits, rows)) else 1


if __name__ == "__main__":
    from benchmarks import bench_memory  # rank processes look for `measure` by the module's real name

    sys.exit(bench_memory.main())
