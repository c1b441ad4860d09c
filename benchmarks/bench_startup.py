"""From the command to the end of the first training step, against a bare Lightning script; and ``--help``.

Wall time of whole processes, in turns. Both train the same GPT on the same shards and log to TensorBoard; the command
brings everything that it brings by default: the check of the configuration, a process per rank, all callbacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.interleave import summarise

ROUNDS = 9
WORDS = (
    "data=shards", "model=gpt-1m", "trainer=cpu", "length.steps=1", "validation.max_tokens=256",
    "batch.global_batch_size=8", "batch.micro_batch_size=8",
)  # fmt: skip
COMMAND = (sys.executable, "-m", "lit_pretrain.cli")


def _seconds(command: list[str], mark: Path | None) -> float:
    begun = time.time()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return (time.time() if mark is None else float(mark.read_text(encoding="utf-8"))) - begun


def _ours(root: Path, run_dir: Path) -> float:
    sources = f"data.corpus.sources={{a: '{root}/a', b: '{root}/b'}}"
    mark = f"+callbacks.mark={{_target_: benchmarks.startup_script.FirstStep, path: '{run_dir}/first'}}"
    words = [*WORDS, sources, f"data.corpus.tokenizer='{root}/tokenizer.json'", f"output_root='{run_dir.parent}'"]
    return _seconds([*COMMAND, "train", *words, f"run_id={run_dir.name}", mark], run_dir / "first")


def _bare(root: Path, run_dir: Path) -> float:
    run_dir.mkdir()
    command = [sys.executable, "-m", "benchmarks.startup_script", str(root), str(run_dir)]
    return _seconds(command, run_dir / "first")


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """Both ratios, and the seconds of ``--help``."""
    from benchmarks.bench_trainer import prepare_shards

    times: dict[str, list[float]] = {"lit-pretrain train": [], "bare Lightning script": []}
    help_times = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare_shards(root)
        _bare(root, root / "warm-bare")  # caches of the file system
        _ours(root, root / "warm-ours")
        for number in range(rounds):
            turns = [("lit-pretrain train", _ours), ("bare Lightning script", _bare)]
            for name, contender in turns if number % 2 else reversed(turns):
                times[name].append(contender(root, root / f"{number}-{name.split()[0]}"))
            help_times.append(_seconds([*COMMAND, "train", "--help"], None))
            help_times.append(_seconds([*COMMAND, "--help"], None))
    rows = summarise(times, against="bare Lightning script")
    return {"rows": rows, "help_s": {"train --help": help_times[::2], "--help": help_times[1::2]}}


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    from statistics import median

    lines = [
        "From the command to the first training step done",
        f"  {'':<26}{'seconds':>9}{'ratio':>9}{'quartiles':>16}",
    ]
    for name, row in figures["rows"].items():
        spread = f"{row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}"
        lines.append(f"  {name:<26}{row['median_s']:>9.2f}{row['ratio']:>9.2f}{spread:>16}")
    for name, seconds in figures["help_s"].items():
        lines.append(f"  lit-pretrain {name:<13}{median(seconds):>9.2f}")
    return "\n".join(lines)
