"""Tokens per second that one core reads from a memory-mapped mixture.

Run ``python -m benchmarks.bench_data``. The files are written to a temporary folder first and stay in the page cache:
the figure is the loader's own cost, not the disk's.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = {"web": 24_000_000, "code": 8_000_000, "math": 3_000_000}  # tokens
VOCAB_SIZE = 50_257
TARGET = 20e6  # tokens a second

# name, sequence length, rows per update, further settings
CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("T=1024", 1024, 64, {}),
    ("T=4096", 4096, 16, {}),
    ("T=256", 256, 64, {}),
    ("T=1024, thread", 1024, 64, {"prefetch": 2}),
    ("T=1024, documents apart", 1024, 64, {"isolate_documents": True}),
]


def write_sources(folder: Path) -> dict[str, Path]:
    """Shard folders of random documents of about 500 tokens."""
    from lit_pretrain.corpus import ShardWriter

    random = np.random.default_rng(0)
    for name, size in SOURCES.items():
        with ShardWriter(folder / name, vocab_size=VOCAB_SIZE, eos_id=0, max_shard_tokens=size // 2) as writer:
            ids = random.integers(1, VOCAB_SIZE, size, dtype=np.uint16)
            for low in range(0, size, 500):
                writer.add(ids[low : low + 500])
    return {name: folder / name for name in SOURCES}


def measure(loader: Any, *, tokens: int, repeats: int) -> list[float]:
    """Tokens per second of CPU time and of wall time alike (the larger time counts), for each pass over the loader."""
    rates = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        read = sum(batch["targets"].numel() for batch in loader)
        spent = max(time.perf_counter() - wall, time.process_time() - cpu)
        assert read == tokens
        rates.append(read / spent)
    return rates


def run(*, repeats: int = 9) -> dict[str, Any]:
    """Medians over ``repeats`` passes of at least 2 million tokens each, after one pass to warm up."""
    import torch

    from lit_pretrain.corpus import ShardFolders
    from lit_pretrain.data import PlanLoader, TokenDataModule

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results: dict[str, Any] = {"repeats": repeats, "target_tokens_per_s": TARGET, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        corpus = ShardFolders(sources=write_sources(Path(folder)))
        for name, sequence_length, rows, settings in CASES:
            module = TokenDataModule(
                corpus,
                sequence_length=sequence_length,
                micro_batch_size=min(rows, 16),
                global_batch_size=rows,
                weights={"web": 6, "code": 3, "math": 1},
                **settings,
            )
            batches = -(-2_000_000 // (module.micro_batch_size * sequence_length))
            loader = PlanLoader(module.read_train, num_batches=batches, depth=settings.get("prefetch", 0))
            tokens = batches * module.micro_batch_size * sequence_length
            measure(loader, tokens=tokens, repeats=1)
            rates = sorted(measure(loader, tokens=tokens, repeats=repeats))
            results["cases"][name] = {
                "median_tokens_per_s": statistics.median(rates),
                "slowest": rates[0],
                "fastest": rates[-1],
            }
    return results


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'reading a mixture of three sources':<40} {'M tokens/s':>10}   (slowest - fastest)"]
    lines += [
        f"{name:<40} {case['median_tokens_per_s'] / 1e6:>10.1f}   "
        f"({case['slowest'] / 1e6:.1f} - {case['fastest'] / 1e6:.1f})"
        for name, case in figures["cases"].items()
    ]
    lines.append(f"one core, medians of {figures['repeats']}; wanted {figures['target_tokens_per_s'] / 1e6:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
