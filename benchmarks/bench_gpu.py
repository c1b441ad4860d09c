"""A GPT of 124M parameters on one GPU: step times of every precision side by side, and how much of the peak they use.

``python -m benchmarks gpu`` prints a table; without a CUDA device it says so in a sentence. Contenders are Lightning
Trainers in processes of their own, which take turns step by step; each waits for the device before it gives its turn
away. All train on the same ids with fused AdamW. Utilisation counts ``6 N + 12 L H D T`` FLOPs a token against the
maker's dense 16-bit figure, float32 too, which has no such kernels.

``LIT_PRETRAIN_BENCH_GPU_ON_CPU=1`` runs a tiny shape on the CPU: it shows that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.interleave import Gate, race, summarise
from benchmarks.interleave import table as rows_table

ON_CPU = "LIT_PRETRAIN_BENCH_GPU_ON_CPU"
NO_GPU = "There is no CUDA device here, so nothing was measured on a GPU."
# GPT-2 small with rows that fill an H200: 16 sequences of 1,024 tokens.
LARGE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304, "block_size": 1024}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "block_size": 16}
ROWS = {"cuda": 16, "cpu": 2}
MODES: dict[str, dict[str, Any]] = {
    "float32": {"precision": "32-true"},
    "Lightning bf16-mixed": {"precision": "bf16-mixed"},
    "masters bf16": {"plugins": "bf16"},
    "Lightning 16-mixed": {"precision": "16-mixed"},
    "masters fp16": {"plugins": "fp16"},
    "Lightning bf16-mixed, compiled": {"precision": "bf16-mixed", "compile": True},
    "masters bf16, compiled": {"plugins": "bf16", "compile": True},
}
AGAINST = "Lightning bf16-mixed"


def _device() -> str | None:
    if os.environ.get(ON_CPU) == "1":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def _shape(device: str) -> dict[str, int]:
    return LARGE if device == "cuda" else TINY


class _Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A few batches again and again, ready for an asynchronous copy."""

    def __init__(self, device: str) -> None:
        shape = _shape(device)
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(shape["vocab_size"], (8, ROWS[device], shape["block_size"] + 1), generator=g)
        parts = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]
        if device == "cuda":
            parts = [(a.pin_memory(), b.pin_memory()) for a, b in parts]
        self.batches = [{"ids": a, "targets": b} for a, b in parts]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.cycle(self.batches)


def contend(name: str, gate: Gate) -> None:
    """Train in one of the modes; a step is from one gate to the next, with all that the device has to do for it."""
    import lightning.pytorch as pl

    from lit_pretrain.module import GPTModule
    from lit_pretrain.plugins import MasterWeightPrecision
    from lit_pretrain.specs import GPTConfig

    device = _device()
    assert device is not None
    settings = dict(MODES[name])
    module = GPTModule(GPTConfig(**_shape(device)), seed=1, compile=settings.pop("compile", False))
    if "plugins" in settings:
        settings["plugins"] = MasterWeightPrecision(settings["plugins"])
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        gate()
        return step(batch, batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=100_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(module, torch.utils.data.DataLoader(_Endless(device), batch_size=None))


def run(*, rounds: int = 15, steps: int = 3) -> dict[str, Any]:
    """Step times with their spread, ratios to Lightning's bf16-mixed, tokens per second and utilisation."""
    device = _device()
    if device is None:
        return {"device": None, "note": NO_GPU}
    from lit_pretrain.planning import flops_per_token, peak_flops
    from lit_pretrain.specs import GPTConfig

    # Lightning turns 16-mixed into bf16-mixed on a CPU.
    names = [name for name in MODES if device == "cuda" or name != "Lightning 16-mixed"]
    times = race({name: functools.partial(contend, name) for name in names}, rounds=rounds, steps=steps)
    rows = summarise(times, against=AGAINST)
    config, tokens = GPTConfig(**_shape(device)), ROWS[device] * _shape(device)["block_size"]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = peak_flops(name)
    for row in rows.values():
        row["tokens_per_s"] = tokens / row["median_s"]
        flops = row["tokens_per_s"] * flops_per_token(config, config.block_size)
        row["mfu"] = flops / peak if peak is not None else None
    return {"device": name, "cuda": torch.version.cuda, "tokens_per_step": tokens, "peak_flops": peak, "rows": rows}


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    if figures["device"] is None:
        return NO_GPU
    lines = [
        rows_table(f"Training step of {figures['tokens_per_step']} tokens on {figures['device']}", figures["rows"])
    ]
    for name, row in figures["rows"].items():
        mfu = "unknown peak" if row["mfu"] is None else f"{row['mfu']:.1%} of the peak"
        lines.append(f"  {name:<34}{row['tokens_per_s']:>12,.0f} tokens/s  {mfu}")
    if figures["device"] == "cpu":
        lines.append(f"On a CPU, to show that it runs. {NO_GPU}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
