"""A command and everything below it: its memory, its CPU time, and pauses in which something else is measured."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(threading.Thread):
    """Samples the resident memory of a process and of everything below it, in MB, while it runs."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.samples: list[float] = []

    def run(self) -> None:
        """Until the process ends."""
        while (total := sum(map(_resident, family(self.pid)))) > 0:
            self.samples.append(total / 1e6)
            time.sleep(0.5)

    def largest(self, low: float, high: float) -> float:
        """Peak between two shares of the samples."""
        count = len(self.samples)
        return max(self.samples[int(low * count) : max(int(low * count) + 1, int(high * count))], default=0.0)


def family(pid: int) -> list[int]:
    """A process and all below it, parents first."""
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


def _signal_all(pid: int, number: signal.Signals) -> None:
    for one in family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


def run_in_turns(
    command: list[str], *, meanwhile: Callable[[], None] | None = None, every_s: float = 30.0
) -> tuple[float, float, Memory]:
    """Run a command, stopping it every ``every_s`` seconds while ``meanwhile`` runs on the machine that it leaves.

    So both are measured under the same other work, at the same temperature.

    Returns:
        Seconds that the command was not stopped, CPU seconds of all its processes, and its memory.

    Raises:
        RuntimeError: The command failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun, stopped = time.monotonic(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    while True:
        try:
            process.wait(None if meanwhile is None else every_s)
            break
        except subprocess.TimeoutExpired:
            pause = time.monotonic()
            _signal_all(process.pid, signal.SIGSTOP)
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                _signal_all(process.pid, signal.SIGCONT)
                stopped += time.monotonic() - pause
    seconds = time.monotonic() - begun - stopped
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, memory
