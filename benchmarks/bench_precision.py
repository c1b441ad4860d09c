"""Lightning's ``MixedPrecision`` and ``MasterWeightPrecision`` side by side on one GPT: losses, bytes, seconds.

``python -m benchmarks precision``; ``python -m benchmarks.bench_precision [--device cpu] [--updates N] [--out FILE]``
does the same and exits with 1 where a figure is more than 5% off. Bytes are those of all tensors that are alive
between two updates, per parameter, against the closed form. On a GPU where there is one. On a CPU 16-bit matrix
products may be emulated: step times mean something on a GPU only (``python -m benchmarks gpu`` has their spread).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.__main__ import circumstances
from benchmarks.bench_memory import alive
from lit_pretrain.module import GPTModule
from lit_pretrain.plugins import MasterWeightPrecision
from lit_pretrain.specs import GPTConfig

TOLERANCE = 0.05
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 1024, "block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 128, "rows": 4},
    "cuda": {"vocab_size": 32768, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "rows": 16},
}
# Bytes per parameter: master, gradient, two moments, and the copy that stays.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "fp32": ({"precision": "32-true"}, 4 + 4 + 8),
    "Lightning bf16-mixed": ({"precision": "bf16-mixed"}, 4 + 4 + 8),
    "masters bf16": ({"plugins": "bf16"}, 4 + 4 + 8 + 2),
    "Lightning 16-mixed": ({"precision": "16-mixed"}, 4 + 4 + 8),
    "masters fp16": ({"plugins": "fp16"}, 4 + 4 + 8 + 2),
}


class Meter(pl.Callback):
    """Losses, bytes and seconds."""

    def __init__(self, before: int) -> None:
        self.before, self.bytes = before, 0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Wait for the device, then start the clock."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Wait for the device, then stop it."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if trainer.global_step == 3:
            self.bytes = alive() - self.before


def measure(name: str, *, device: str, updates: int) -> dict[str, Any]:
    """One training."""
    settings, bytes_wanted = MODES[name]
    given = {k: MasterWeightPrecision(v) if k == "plugins" else v for k, v in settings.items()}
    shape = dict(SHAPES[device])
    rows = shape.pop("rows")
    g = torch.Generator().manual_seed(1)
    data = torch.randint(64, (updates, rows, shape["block_size"] + 1), generator=g)
    batches = [{"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()} for ids in data]
    before = alive()
    meter = Meter(before)
    module = GPTModule(GPTConfig(**shape, vocab_multiple=1), seed=1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=updates,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[meter],
        **given,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    numel = sum(p.numel() for p in module.parameters())
    later = sorted(meter.seconds[min(5, updates // 2) :])
    out = {
        "mode": name,
        "device": device,
        "bytes_per_parameter": round(meter.bytes / numel, 3),
        "closed_form": bytes_wanted,
        "first_loss": meter.losses[0],
        "last_loss": meter.losses[-1],
        "losses": meter.losses,
        "seconds": statistics.median(later),
        "quartiles": [later[len(later) // 4], later[3 * len(later) // 4]],
        "peak_bytes_per_parameter": torch.cuda.max_memory_allocated() / numel if device == "cuda" else None,
        "skipped": getattr(trainer.precision_plugin, "skipped_updates", None),
    }
    out["ok"] = abs(out["bytes_per_parameter"] / bytes_wanted - 1) <= TOLERANCE
    del trainer, module
    return out


def run(device: str | None = None, updates: int = 20) -> list[dict[str, Any]]:
    """A row per mode; on a GPU where there is one, unless told otherwise."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Lightning turns 16-mixed into bf16-mixed on a CPU.
    names = [n for n in MODES if device == "cuda" or n != "Lightning 16-mixed"]
    return [measure(name, device=device, updates=updates) for name in names]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; losses against those of the first."""
    lines = [f"{'':<22}{'bytes/par.':>11}{'theory':>8}{'last loss':>11}{'furthest':>10}{'ms/step':>9}"]
    for row in rows:
        apart = max(abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
        lines.append(
            f"{row['mode']:<22}{row['bytes_per_parameter']:>11.2f}{row['closed_form']:>8}{row['last_loss']:>11.4f}"
            f"{apart:>10.1e}{1e3 * row['seconds']:>9.1f}{'' if row['ok'] else '  FAILED'}"
        )
    if rows[0]["device"] == "cpu":
        lines.append("Step times on a CPU say nothing about 16 bits: it may emulate them.")
    return "\n".join(lines)


def main() -> int:
    """Measure and say whether the bytes are those of the closed form."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_precision", description=__doc__)
    parser.add_argument("--device", choices=sorted(SHAPES), help="a GPU where there is one")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("outputs/precision.json"))
    arguments = parser.parse_args()
    rows = run(arguments.device, arguments.updates)
    print(table(rows))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {**circumstances(), "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
