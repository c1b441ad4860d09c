"""A preparation against the tokenizer library alone, on the same text with the same cores, in turns.

Run ``python -m benchmarks.bench_prepare [GIGABYTES]``; it is not among the default ones, for 1 GB takes a quarter of
an hour on two quiet cores, and some GB of disk. The text is this machine's Python code, its lines drawn anew until
there is enough of it. The preparation runs twice: once as it is, stopped every now and then while the library is
measured, and once killed half way and started again; the shards must be the same.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.processes import run_in_turns

VOCAB_SIZE = 16_384
FILES = 8
SMALL = 12_000_000  # bytes on which the library is measured and the tokenizer trained
_SLICE = 2_000_000  # bytes that the library encodes in a turn, per core


def write_text(folder: Path, *, gigabytes: float) -> int:
    """JSONL of documents made of blocks of real lines in a new order; gives the bytes of text."""
    import sysconfig

    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    blocks: list[str] = []
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))[:6000]):
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeError):
            continue
        blocks += ["".join(lines[low : low + 12]) for low in range(0, len(lines), 12)]
    rng = random.Random(0)
    written = 0
    for number in range(FILES):
        with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as file:
            while written < gigabytes * 1e9 * (number + 1) / FILES:
                text = "".join(rng.choices(blocks, k=rng.randint(1, 16)))
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
    return written


class Library:
    """``encode_batch`` alone: in one process per core, each with one thread, and in one process with its own threads.

    Args:
        text: JSONL; read before anything is measured.
        tokenizer: ``tokenizer.json``.
        cores: Of the machine.
    """

    def __init__(self, text: Path, tokenizer: Path, *, cores: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.samples: dict[str, list[tuple[float, float, float]]] = {}  # MB, seconds, CPU seconds
        self._cores = cores
        self._turn = 0
        self._pools = {
            kind: ProcessPoolExecutor(processes, context, _open, (str(text), str(tokenizer), kind))
            for kind, processes in (("processes", cores), ("threads", 1))
        }
        for _ in range(2):  # warm: every process has read its text
            self.measure()
        self.samples.clear()

    def measure(self) -> None:
        """One turn of each kind, on other parts of the text than the last."""
        for kind, pool in self._pools.items():
            shares = self._cores if kind == "processes" else 1
            size = _SLICE if kind == "processes" else _SLICE * self._cores
            done = list(pool.map(_encode, [(self._turn * shares + share, size) for share in range(shares)]))
            begun, ended, cpu, num_bytes = zip(*done, strict=True)
            seconds = max(ended) - min(begun)
            self.samples.setdefault(kind, []).append((sum(num_bytes) / 1e6, seconds, sum(cpu)))
        self._turn += 1

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.shutdown()

    def speed(self, kind: str) -> tuple[float, float]:
        """MB a second and a CPU second, over all turns."""
        mb, seconds, cpu = (sum(column) for column in zip(*self.samples[kind], strict=True))
        return mb / seconds, mb / cpu


@cache
def _loaded() -> dict[str, Any]:
    return {}


def _open(text: str, tokenizer: str, kind: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if kind == "threads" else "false"
    from lit_pretrain.corpus import TokenizerFile

    lines = Path(text).read_text(encoding="utf-8").splitlines()
    _loaded().update(texts=[json.loads(line)["text"] for line in lines], tokenizer=TokenizerFile(tokenizer))


def _encode(task: tuple[int, int]) -> tuple[float, float, float, int]:
    """Start, end, CPU seconds and bytes of encoding the ``part``-th piece of ``size`` bytes, round and round."""
    part, size = task
    texts, tokenizer = _loaded()["texts"], _loaded()["tokenizer"]
    place = part * 977 % len(texts)
    chosen: list[str] = []
    num_bytes = 0
    while num_bytes < size:
        chosen.append(texts[place % len(texts)])
        num_bytes += len(chosen[-1].encode())
        place += 1
    begun, cpu = time.time(), time.process_time()
    for low in range(0, len(chosen), 500):
        tokenizer.encode_batch(chosen[low : low + 500])
    return begun, time.time(), time.process_time() - cpu, num_bytes


def _command(text: Path, output: Path, *, tokenizer: Path | str) -> list[str]:
    words = [f"input={text}", f"output={output}", f"tokenizer={tokenizer}", f"vocab_size={VOCAB_SIZE}"]
    return [sys.executable, "-m", "lit_pretrain.cli", "prepare", *words]


def _kill_half_way(command: list[str], parts: Path, *, units: int) -> int:
    """Units that were finished when the command was killed."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(parts.glob("[0-9]*"))) < units // 2 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)
    return len(list(parts.glob("[0-9]*")))


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def run(*, gigabytes: float = 1.0, turns: int = 12) -> dict[str, Any]:
    """All figures.

    Args:
        gigabytes: Text to prepare, in 10^9 bytes.
        turns: About how often the library is measured while the preparation is stopped.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        text_bytes = write_text(folder / "text", gigabytes=gigabytes)
        small = folder / "small.jsonl"
        with (folder / "text" / "0.jsonl").open("rb") as file:
            small.write_bytes(b"".join(file.readlines(SMALL)))
        run_in_turns(_command(small, folder / "first", tokenizer="train"))
        tokenizer = folder / "first" / "tokenizer.json"
        library = Library(small, tokenizer, cores=cores)
        library.measure()
        _say("library alone, MB/s: ", ", ".join(f"{kind} {library.speed(kind)[0]:.2f}" for kind in library.samples))
        every_s = text_bytes / 1e6 / library.speed("processes")[0] / turns
        whole = _command(folder / "text", folder / "whole", tokenizer=tokenizer)
        seconds, cpu, memory = run_in_turns(whole, meanwhile=library.measure, every_s=every_s)
        library.close()
        _say(f"prepared in {seconds:.0f} s; now once more, killed half way")
        record = json.loads((folder / "whole" / "prepare.json").read_text())
        units = record["splits"]["train"]["shards"]
        again = _command(folder / "text", folder / "killed", tokenizer=tokenizer)
        finished = _kill_half_way(again, folder / "killed" / ".parts", units=units)
        resumed, _, _ = run_in_turns(again)
        same = _checksums(folder / "whole") == _checksums(folder / "killed")
    speeds = {kind: library.speed(kind) for kind in library.samples}
    return {
        "text_bytes": text_bytes,
        "cores": cores,
        "vocab_size": VOCAB_SIZE,
        "splits": record["splits"],
        "seconds": seconds,
        "mb_per_s": text_bytes / 1e6 / seconds,
        "mb_per_cpu_s": text_bytes / 1e6 / cpu,
        "library_mb_per_s": {kind: wall for kind, (wall, _) in speeds.items()},
        "library_mb_per_cpu_s": {kind: of_cpu for kind, (_, of_cpu) in speeds.items()},
        "library_mb_per_s_by_turn": {
            kind: [mb / wall for mb, wall, _ in some] for kind, some in library.samples.items()
        },
        "memory_mb_by_quarter": [memory.largest(low / 4, (low + 1) / 4) for low in range(4)],
        "killed_after_units": finished,
        "units": units,
        "resumed_seconds": resumed,
        "same_shards_after_a_kill": same,
    }


def _say(*words: str) -> None:
    print(*words, sep="", file=sys.stderr, flush=True)


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    wall, cpu = figures["library_mb_per_s"], figures["library_mb_per_cpu_s"]
    rows = {
        "tokenizers alone, one process per core": (wall["processes"], cpu["processes"]),
        "tokenizers alone, its own threads": (wall["threads"], cpu["threads"]),
        "prepare, start to end": (figures["mb_per_s"], figures["mb_per_cpu_s"]),
    }
    best = max(wall.values()), max(cpu.values())
    ratios = (figures["mb_per_s"] / best[0], figures["mb_per_cpu_s"] / best[1])
    quarters = ", ".join(f"{mb:.0f}" for mb in figures["memory_mb_by_quarter"])
    turns = figures["library_mb_per_s_by_turn"]["processes"]
    low, _, high = statistics.quantiles(turns, n=4)
    return "\n".join(
        (
            f"{figures['text_bytes'] / 1e9:.2f} GB of text on {figures['cores']} cores, "
            f"vocab_size={figures['vocab_size']}",
            f"{'':<45}{'MB/s':>8}{'MB/CPU s':>10}",
            *(f"{name:<45}{per_s:>8.2f}{per_cpu_s:>10.2f}" for name, (per_s, per_cpu_s) in rows.items()),
            f"{'prepare / the better of the two':<45}{ratios[0]:>8.2f}{ratios[1]:>10.2f}",
            f"{'quartiles of the library over ' + str(len(turns)) + ' turns':<45}{low:>8.2f} to {high:.2f} MB/s",
            f"{'peak memory of all processes, by quarter':<45}{quarters} MB",
            f"killed after {figures['killed_after_units']} of {figures['units']} units, the rest in "
            f"{figures['resumed_seconds']:.0f} s: "
            + ("the same shards" if figures["same_shards_after_a_kill"] else "OTHER SHARDS"),
        )
    )


if __name__ == "__main__":
    figures = run(gigabytes=float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
    print(table(figures))
    print(json.dumps(figures))
