"""Saving and loading a checkpoint folder against torch.save of the same state, and what a save in the background costs.

Run ``python -m benchmarks.bench_checkpoint [FOLDER]``; FOLDER lies on the disk to be measured (default: the temporary
folder). The peer is torch.save through a writer that hashes with the same checksum, fsync, and torch.load after a pass
that compares the checksum: the same promises, without names, index and completion marker. Repeats are taken in turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LAYERS, WIDTH, VOCAB_SIZE = 8, 384, 8192  # with AdamW about 208 MB in 260 tensors
BANDWIDTH_TARGET = 1.0  # times the peer's, at least
STALL_TARGET = 1.3  # copies of the state in memory, at most


def state() -> dict[str, Any]:
    """Parameters and AdamW state of a small GPT, by the names of a checkpoint."""
    import torch

    shapes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    parameters = {"wte.weight": torch.randn(VOCAB_SIZE, WIDTH)}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            parameters[f"blocks.{layer}.{name}.weight"] = torch.randn(rows * WIDTH, columns * WIDTH)
        for name in ("norm_1", "norm_2"):
            parameters[f"blocks.{layer}.{name}.weight"] = torch.ones(WIDTH)
    out = {f"model.{name}": tensor for name, tensor in parameters.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        out |= {f"optimizer.0.{key}.{name}": torch.randn_like(tensor) for name, tensor in parameters.items()}
    return out | {f"optimizer.0.step.{name}": torch.tensor(1.0) for name in parameters}


class _Hashing:
    """A file that hashes what torch.save writes into it."""

    def __init__(self, file: Any, algorithm: str) -> None:
        from lit_pretrain.distributed.checkpoint import files

        self.file, self.hash = file, files.new_hash(algorithm)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()


def peer_save(tensors: Mapping[str, Any], path: Path, *, algorithm: str) -> str:
    """torch.save, hashed while writing, and fsync; gives the checksum."""
    import torch

    with open(path, "wb") as file:
        stream = _Hashing(file, algorithm)
        torch.save(dict(tensors), stream)  # type: ignore[arg-type]  # write and flush are all it needs
        file.flush()
        os.fsync(file.fileno())
    return f"{algorithm}:{stream.hash.hexdigest()}"


def peer_load(path: Path, checksum: str) -> Any:
    """One pass that compares the checksum, then torch.load."""
    import torch

    from lit_pretrain.distributed.checkpoint import files

    assert files.checksum_file(path, algorithm=checksum.partition(":")[0]) == checksum
    return torch.load(path, weights_only=True)


def _interleaved(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each contender in every round; the order turns with the rounds, and one round warms up."""
    names = list(contenders)
    out: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            started = clock()
            kept = contenders[name]()
            spent = clock() - started
            del kept  # giving memory back is nobody's cost
            if repeat:
                out[name].append(spent)
    return out


def _against(times: Mapping[str, list[float]], ours: str, peer: str) -> float:
    """The median over rounds of how many times faster ``ours`` is."""
    return statistics.median(b / a for a, b in zip(times[ours], times[peer], strict=True))


def bandwidth(folder: Path, *, repeats: int = 9) -> dict[str, Any]:
    """MB/s of saving to the disk and of loading with every byte checked, against the peer's."""
    from lit_pretrain.distributed.checkpoint import CheckpointFacts, files, read_checkpoint, verify, write_checkpoint

    tensors = state()
    size = sum(tensor.nbytes for tensor in tensors.values())
    ours, peer = folder / "ours", folder / "peer.pt"
    facts = CheckpointFacts(global_step=1)
    checksum = peer_save(tensors, peer, algorithm=files.FAST)
    contenders: dict[str, Callable[[], object]] = {
        "save, folder": lambda: write_checkpoint(ours, tensors=tensors, tree={}, facts=facts),
        "save, torch.save": lambda: peer_save(tensors, peer, algorithm=files.FAST),
        "load, folder": lambda: read_checkpoint(ours),
        "load, torch.load": lambda: peer_load(peer, checksum),
        "verify, folder": lambda: verify(ours),
    }
    times = _interleaved(contenders, repeats=repeats)
    work = _interleaved(contenders, repeats=3, clock=time.process_time)
    return {
        "bytes": size,
        "tensors": len(tensors),
        "checksum": files.FAST,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "fastest_s": {name: min(values) for name, values in times.items()},
        "slowest_s": {name: max(values) for name, values in times.items()},
        "median_cpu_s": {name: statistics.median(values) for name, values in work.items()},
        "save_ratio": _against(times, "save, folder", "save, torch.save"),
        "load_ratio": _against(times, "load, folder", "load, torch.load"),
    }


def stall(folder: Path, *, repeats: int = 9) -> dict[str, Any]:
    """How long a call that saves in the background keeps the caller, in copies of the state in memory."""
    import torch

    from lit_pretrain.distributed.checkpoint import BackgroundWriter, CheckpointFacts

    tensors = state()
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    writer = BackgroundWriter()
    times: dict[str, list[float]] = {"call": [], "copy": [], "call cpu": [], "copy cpu": []}
    for repeat in range(repeats + 1):  # the first pays for the memory, once in a run
        for name in ("call", "copy") if repeat % 2 else ("copy", "call"):
            started, worked = time.perf_counter(), time.thread_time()
            if name == "call":
                facts = CheckpointFacts(global_step=repeat)
                writer.save(folder / "background", tensors=tensors, tree={"epoch": 1}, facts=facts)
            else:
                for key, tensor in tensors.items():
                    buffers[key].copy_(tensor)
            spent, work = time.perf_counter() - started, time.thread_time() - worked
            if repeat:
                times[name].append(spent)
                times[f"{name} cpu"].append(work)
            writer.wait()  # else a copy would be measured next to the writing of the save before
    writer.close()
    return {
        "call_s": statistics.median(times["call"]),
        "copy_s": statistics.median(times["copy"]),
        "ratio": statistics.median(a / b for a, b in zip(times["call"], times["copy"], strict=True)),
        "cpu_ratio": statistics.median(a / b for a, b in zip(times["call cpu"], times["copy cpu"], strict=True)),
    }


def checksums(*, repeats: int = 5) -> dict[str, float]:
    """GB/s that one thread hashes."""
    from lit_pretrain.distributed.checkpoint import files

    data = os.urandom(1 << 26)
    names = ("crc32", "sha256", "blake2b")
    contenders = {name: (lambda name=name: files.checksum(data, algorithm=name)) for name in names}
    return {name: len(data) / min(t) / 1e9 for name, t in _interleaved(contenders, repeats=repeats).items()}


def run(*, repeats: int = 9, folder: Path | None = None) -> dict[str, Any]:
    """All figures; leaves nothing in ``folder``."""
    import torch

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder))
    try:
        return {
            "repeats": repeats,
            "bandwidth": bandwidth(scratch, repeats=repeats),
            "stall": stall(scratch, repeats=repeats),
            "checksums_gb_per_s": checksums(),
            "targets": {"bandwidth": BANDWIDTH_TARGET, "stall": STALL_TARGET},
        }
    finally:
        shutil.rmtree(scratch)


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    found = figures["bandwidth"]
    megabytes = found["bytes"] / 1e6
    head = f"{megabytes:.0f} MB in {found['tensors']} tensors, {found['checksum']}"
    lines = [f"{head:<40} {'MB/s':>10}   (slowest - fastest){'CPU s':>10}"]
    for name, seconds in found["median_s"].items():
        low, high = megabytes / found["slowest_s"][name], megabytes / found["fastest_s"][name]
        spread, work = f"({low:.0f} - {high:.0f})", found["median_cpu_s"][name]
        lines.append(f"{name:<40} {megabytes / seconds:>10.0f}   {spread:<19}{work:>10.2f}")
    stalled = figures["stall"]
    lines += [
        f"saving is {found['save_ratio']:.2f} and loading {found['load_ratio']:.2f} times as fast as the peer; "
        f"wanted at least {figures['targets']['bandwidth']}",
        f"a save in the background keeps the caller {stalled['call_s'] * 1e3:.0f} ms: {stalled['ratio']:.2f} copies of "
        f"the state ({stalled['copy_s'] * 1e3:.0f} ms); wanted at most {figures['targets']['stall']}; "
        f"{stalled['cpu_ratio']:.2f} in CPU time",
        "hashing, one thread, GB/s: " + ", ".join(f"{k} {v:.2f}" for k, v in figures["checksums_gb_per_s"].items()),
        f"medians of {figures['repeats']}, in turns",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
