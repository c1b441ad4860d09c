"""Times contenders in turns, one at a time: each in a process of its own, or plain steps in one process.

Machines are noisy: a figure is only worth something as a ratio from runs that were interleaved. In :func:`race`, each
contender is a function ``contender(gate)`` that calls ``gate()`` once per step, anywhere in its loop; the call returns
when it is that contender's turn. The time of a step is the time from one return of ``gate`` to the next call of it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

Gate = Callable[[], None]
Contender = Callable[[Gate], None]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Step times of one contender, in seconds: medians over rounds, and the quartiles that show their spread."""

    median_s: float
    q1_s: float
    q3_s: float
    rounds: int


class _Finished(BaseException):
    """Unwinds a contender when the race is over."""


def _serve(contender: Contender, turns: Connection, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    started: float | None = None

    def gate() -> None:
        nonlocal started
        if started is not None:
            turns.send(time.perf_counter() - started)
        if turns.recv() == "stop":
            raise _Finished
        started = time.perf_counter()

    try:
        contender(gate)
        turns.send("ended")
    except _Finished:
        pass
    turns.close()
    os._exit(0)  # a trainer in the middle of a step has nothing to tear down


def race(
    contenders: Mapping[str, Contender], *, rounds: int = 11, steps: int = 5, warmup: int = 5, threads: int = 2
) -> dict[str, list[float]]:
    """Mean step time of every round, per contender.

    Args:
        contenders: Module-level functions by name.
        rounds: Each gives one figure per contender.
        steps: Steps of every contender in a round, taken in turns of one step; the order turns with every turn. As
            many as a period of whatever happens only now and then, such as logging, so that a mean holds its share.
        warmup: Steps before the first round.
        threads: Torch threads of each contender.

    Raises:
        RuntimeError: A contender ended or died before the race did.
    """
    context = mp.get_context("spawn")
    lanes: dict[str, tuple[Any, Connection]] = {}
    for name, contender in contenders.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(contender, theirs, threads), daemon=True)
        process.start()
        theirs.close()
        lanes[name] = process, ours

    def step(name: str) -> float:
        turns = lanes[name][1]
        try:
            turns.send("go")
            answer = turns.recv()
        except (EOFError, BrokenPipeError) as e:
            raise RuntimeError(f"contender {name!r} died; see its traceback above.") from e
        if answer == "ended":
            raise RuntimeError(f"contender {name!r} ended before the race did; give it more steps.")
        return float(answer)

    names = list(contenders)
    out: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:
            for _ in range(warmup):
                step(name)
        for _ in range(rounds):
            seconds = dict.fromkeys(names, 0.0)
            for turn in range(steps):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    seconds[name] += step(name)
            for name in names:
                out[name].append(seconds[name] / steps)
    finally:
        for process, turns in lanes.values():
            if process.is_alive():
                turns.send("stop")
            process.join(5)
            if process.is_alive():
                process.kill()
    return out


def race_here(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, repeats: int = 1, warmup: int = 2, threads: int = 2
) -> dict[str, list[float]]:
    """Mean time of every round, per contender, all in this process.

    For contenders that may share one: where a process happens to get its memory moves its matrix products by several
    per cent for as long as it lives, which :func:`race` cannot tell from a difference between contenders.

    Args:
        steps: What to time, by name.
        rounds: Each gives one figure per contender.
        repeats: Steps of every contender in a round, one at a time, in an order drawn anew for each.
        warmup: Steps before the first round.
        threads: Torch threads; the former number is restored.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    draw = random.Random(0)
    out: dict[str, list[float]] = {name: [] for name in steps}
    try:
        for name in [*steps] * warmup:
            steps[name]()
        for _ in range(rounds):
            seconds = dict.fromkeys(steps, 0.0)
            for _ in range(repeats):
                for name in draw.sample([*steps], len(steps)):
                    started = time.perf_counter()
                    steps[name]()
                    seconds[name] += time.perf_counter() - started
            for name, total in seconds.items():
                out[name].append(total / repeats)
    finally:
        torch.set_num_threads(before)
    return out


def summarise(times: Mapping[str, list[float]], *, against: str) -> dict[str, Any]:
    """Timings, and each contender's ratio to ``against``: the median of the rounds' ratios, with quartiles."""
    rows: dict[str, Any] = {}
    for name, values in times.items():
        q1, median, q3 = statistics.quantiles(values, n=4)
        ratios = [a / b for a, b in zip(values, times[against], strict=True)]
        r1, ratio, r3 = statistics.quantiles(ratios, n=4)
        timing = Timing(median_s=median, q1_s=q1, q3_s=q3, rounds=len(values))
        rows[name] = {**asdict(timing), "ratio": ratio, "ratio_q1": r1, "ratio_q3": r3, "against": against}
    return rows


def table(title: str, rows: Mapping[str, Any]) -> str:
    """The rows as text."""
    lines = [title, f"  {'':<34}{'step, ms':>10}{'quartiles':>18}{'ratio':>9}{'quartiles':>18}"]
    for name, row in rows.items():
        spread = f"{row['q1_s'] * 1e3:.1f}-{row['q3_s'] * 1e3:.1f}"
        ratios = f"{row['ratio_q1']:.3f}-{row['ratio_q3']:.3f}"
        lines.append(f"  {name:<34}{row['median_s'] * 1e3:>10.1f}{spread:>18}{row['ratio']:>9.3f}{ratios:>18}")
    return "\n".join(lines)
