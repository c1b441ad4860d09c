"""Runs every benchmark in a process of its own, prints its table and writes all figures as JSON.

``python -m benchmarks [NAME ...] [--out FILE]``; the JSON names the revision and the machine it was measured on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("data", "gpu", "model", "precision", "startup", "trainer")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def circumstances() -> dict[str, Any]:
    """What a figure is worth nothing without."""
    import torch

    return {
        "revision": _output("git", "rev-parse", "HEAD"),
        "changed_files": len(_output("git", "status", "--porcelain").splitlines()),
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _one(name: str) -> None:
    bench = importlib.import_module(f"benchmarks.bench_{name}")
    figures = bench.run()
    print(bench.table(figures), file=sys.stderr, flush=True)
    json.dump(figures, sys.stdout)


def main() -> int:
    """Run the named benchmarks, all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks.json"))
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        _one(arguments.one)
        return 0
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"{unknown[0]!r} is not a benchmark; use {', '.join(NAMES)}")
    report: dict[str, Any] = {**circumstances(), "figures": {}}
    failed = []
    for name in arguments.names or NAMES:
        print(f"==> benchmark: {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks", "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            failed.append(name)
            continue
        report["figures"][name] = json.loads(done.stdout.splitlines()[-1])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"figures: {arguments.out}")
    for name in failed:
        print(f"benchmark {name} failed; see above.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
