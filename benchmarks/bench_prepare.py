"""A preparation against the tokenizer library alone, on the same text with the same cores.

Run ``python -m benchmarks.bench_prepare``; it is not among the default ones, for it takes minutes and some GB of disk.
The text is this machine's Python code, its lines drawn anew until there is enough of it. The preparation is run twice:
once as it is, once killed half way and started again; the shards must be the same.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

VOCAB_SIZE = 16_384
FILES = 8
SMALL = 24_000_000  # bytes on which the library is measured and the tokenizer trained
_PAGE = os.sysconf("SC_PAGE_SIZE")


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


def _read(path: Path, share: int, shares: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[share::shares]]


def _encode(task: tuple[Path, str, int, int]) -> tuple[float, float, float, int]:
    """Start, end, CPU seconds and bytes of encoding a share of a file that is in memory."""
    path, tokenizer_path, share, shares = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if shares > 1 else "true"
    from lit_pretrain.corpus import TokenizerFile

    tokenizer = TokenizerFile(tokenizer_path)
    texts = _read(path, share, shares)
    tokenizer.encode_batch(texts[:50])
    begun, cpu = time.time(), time.process_time()
    for low in range(0, len(texts), 500):
        tokenizer.encode_batch(texts[low : low + 500])
    return begun, time.time(), time.process_time() - cpu, sum(len(text.encode()) for text in texts)


def library_speed(path: Path, tokenizer: Path, *, processes: int) -> tuple[float, float]:
    """``encode_batch`` alone, in processes of one thread, or with 1 in the library's threads.

    Gives MB of text a second, and a CPU second.
    """
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [(path, str(tokenizer), share, processes) for share in range(processes)]
        done = list(pool.map(_encode, tasks))
    begun, ended, cpu, size = zip(*done, strict=True)
    return sum(size) / 1e6 / (max(ended) - min(begun)), sum(size) / 1e6 / sum(cpu)


class Memory(threading.Thread):
    """Samples the resident memory of a process and of everything below it, in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        """Until the process ends."""
        begun = time.monotonic()
        while (total := sum(map(_resident, _family(self.pid)))) > 0:
            self.samples.append((time.monotonic() - begun, total / 1e6))
            time.sleep(0.5)

    def largest(self, low: float, high: float) -> float:
        """Peak between two shares of the time."""
        last = self.samples[-1][0]
        return max((mb for at, mb in self.samples if low * last <= at <= high * last), default=0.0)


def _family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _command(text: Path, output: Path, *, tokenizer: Path | str) -> list[str]:
    words = [f"input={text}", f"output={output}", f"tokenizer={tokenizer}", f"vocab_size={VOCAB_SIZE}"]
    return [sys.executable, "-m", "lit_pretrain.cli", "prepare", *words]


def _prepare(command: list[str]) -> tuple[float, float, Memory]:
    """Seconds, CPU seconds of all its processes, and memory."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun, cpu, memory


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


def run(*, gigabytes: float = 1.0, repeats: int = 2) -> dict[str, Any]:
    """All figures; the library is measured before and after, for the speed of a shared machine drifts."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        text_bytes = write_text(folder / "text", gigabytes=gigabytes)
        small = folder / "small.jsonl"
        with (folder / "text" / "0.jsonl").open("rb") as file:
            small.write_bytes(b"".join(file.readlines(SMALL)))
        _prepare(_command(small, folder / "first", tokenizer="train"))
        tokenizer = folder / "first" / "tokenizer.json"
        alone: dict[str, list[tuple[float, float]]] = {"processes": [], "threads": []}

        def measure_library() -> None:
            for _ in range(repeats):
                alone["processes"].append(library_speed(small, tokenizer, processes=cores))
                alone["threads"].append(library_speed(small, tokenizer, processes=1))

        measure_library()
        seconds, cpu, memory = _prepare(_command(folder / "text", folder / "whole", tokenizer=tokenizer))
        measure_library()
        record = json.loads((folder / "whole" / "prepare.json").read_text())
        units = record["splits"]["train"]["shards"]
        again = _command(folder / "text", folder / "killed", tokenizer=tokenizer)
        finished = _kill_half_way(again, folder / "killed" / ".parts", units=units)
        resumed, _, _ = _prepare(again)
        same = _checksums(folder / "whole") == _checksums(folder / "killed")
    return {
        "text_bytes": text_bytes,
        "cores": cores,
        "vocab_size": VOCAB_SIZE,
        "splits": record["splits"],
        "seconds": seconds,
        "mb_per_s": text_bytes / 1e6 / seconds,
        "mb_per_cpu_s": text_bytes / 1e6 / cpu,
        "library_mb_per_s": {kind: statistics.median(wall for wall, _ in found) for kind, found in alone.items()},
        "library_mb_per_cpu_s": {kind: statistics.median(cpu for _, cpu in found) for kind, found in alone.items()},
        "library_samples": alone,
        "memory_mb_by_quarter": [memory.largest(low / 4, (low + 1) / 4) for low in range(4)],
        "killed_after_units": finished,
        "units": units,
        "resumed_seconds": resumed,
        "same_shards_after_a_kill": same,
    }


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
    return "\n".join(
        (
            f"{figures['text_bytes'] / 1e9:.2f} GB of text on {figures['cores']} cores, "
            f"vocab_size={figures['vocab_size']}",
            f"{'':<45}{'MB/s':>8}{'MB/CPU s':>10}",
            *(f"{name:<45}{per_s:>8.2f}{per_cpu_s:>10.2f}" for name, (per_s, per_cpu_s) in rows.items()),
            f"{'prepare / the better of the two':<45}{ratios[0]:>8.2f}{ratios[1]:>10.2f}",
            f"{'peak memory of all processes, by quarter':<45}{quarters} MB",
            f"killed after {figures['killed_after_units']} of {figures['units']} units, the rest in "
            f"{figures['resumed_seconds']:.0f} s: "
            + ("the same shards" if figures["same_shards_after_a_kill"] else "OTHER SHARDS"),
        )
    )


if __name__ == "__main__":
    print(table(run(gigabytes=float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)))
