"""Idle time and held activations of every pipeline schedule, on stages whose work is a sleep of known length.

Sleeping stages do not compete for the cores of one machine, so that what is measured is the schedule: its order, its
messages, and what waits for what. Forward, input gradient and weight gradient of a rank's layers take equally long.

``python -m benchmarks.bench_bubble [--ranks 4] [--microbatches 8] [--work-ms 800]`` prints a table, and exits 1 where a
bubble is more than a tenth away from theory, or where other activations are held than theory says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import weakref
from typing import Any

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]
TOLERANCE = 0.1  # of theory
REPEATS = 2


class Held:
    """Counts tensors that are alive."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, tensor: Any) -> None:
        """Count a tensor until its memory is freed."""
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._freed)

    def _freed(self) -> None:
        self.now -= 1


def sleeping_model(*, layers: int, seconds: float, held: Held) -> Any:
    """A chain of layers, each of which sleeps: forward, input gradient and weight gradient ``seconds`` each.

    Two nodes, so that a schedule can compute the two gradients apart, as those of a matrix product.
    """
    import torch
    from torch import Tensor, nn

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            activations = x.clone()
            held.watch(activations)
            ctx.save_for_backward(activations)
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            time.sleep(seconds)
            return grad.clone()

    class Weigh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            time.sleep(seconds)
            return grad.clone()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()  # the first layer has an input gradient too, to its embedding
            out: Tensor = Through.apply(x) + Weigh.apply(self.weight)
            return out

    return nn.Sequential(*[Layer() for _ in range(layers)])


def _rank(rank: int, ranks: int, microbatches: int, work_s: float, store: str, answers: Any) -> None:
    """One rank: every schedule in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # a rank that wakes must not wait for other work on the machine
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for schedule, stages in SCHEDULES:
        seconds, held = _timed(schedule, stages=stages, microbatches=microbatches, work_s=work_s)
        answers.put((schedule, stages, rank, seconds, held))
    dist.barrier()
    dist.destroy_process_group()


def _timed(schedule: str, *, stages: int, microbatches: int, work_s: float) -> tuple[float, int]:
    """Seconds of this rank's fastest step, and the most activations that it held."""
    import torch
    import torch.distributed as dist

    from lit_pretrain.distributed.pipeline import Call, Pipeline, PipelineLayout, PipelineParts
    from lit_pretrain.specs import ParallelPlan

    ranks, held = dist.get_world_size(), Held()
    model = sleeping_model(layers=ranks * stages, seconds=work_s / stages, held=held)
    plan = ParallelPlan(blocks="")
    layout = PipelineLayout.of(
        model, plan, schedule=schedule, ranks=ranks, num_microbatches=microbatches, wanted_stages_per_rank=stages
    )
    assert dist.group.WORLD is not None
    parts = PipelineParts(model, plan, layout, rank=dist.get_rank())
    pipeline = Pipeline(parts, device=torch.device("cpu"), group=dist.group.WORLD)
    call = Call((torch.zeros(microbatches, 2),))
    times = []
    for repeat in range(REPEATS + 1):  # the first one also exchanges shapes
        if repeat == 1:
            held.most = held.now
        dist.barrier()
        start = time.perf_counter()
        pipeline.train(call, lambda output, i: output.sum())
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times[1:]), held.most


def run(*, ranks: int = 4, microbatches: int = 8, work_s: float = 0.8) -> dict[str, Any]:
    """Every schedule's measured bubble and peak, beside what theory says."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    got: dict[tuple[str, int], dict[int, tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, microbatches, work_s, f"{folder}/store", answers)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        while sum(map(len, got.values())) < ranks * len(SCHEDULES):
            try:
                schedule, stages, rank, seconds, held = answers.get(timeout=1.0)
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise RuntimeError("A rank failed; see above.") from None
                continue
            got.setdefault((schedule, stages), {})[rank] = (seconds, held)
        for process in processes:
            process.join()
    rows = [
        _row(schedule, stages, got[schedule, stages], ranks=ranks, microbatches=microbatches, work_s=work_s)
        for schedule, stages in SCHEDULES
    ]
    return {"ranks": ranks, "microbatches": microbatches, "work_s": work_s, "schedules": rows}


def _row(
    schedule: str, stages: int, got: dict[int, tuple[float, int]], *, ranks: int, microbatches: int, work_s: float
) -> dict[str, Any]:
    from lit_pretrain.schedules.pipeline import bubble_fraction, peak_in_flight

    sizes = {"ranks": ranks, "microbatches": microbatches, "stages": stages}
    ideal, step = 3 * work_s * microbatches, max(seconds for seconds, _ in got.values())
    theory = bubble_fraction(schedule, **sizes)
    assert theory is not None, "too few microbatches to fill the pipeline"
    return {
        "schedule": schedule,
        "stages_per_rank": stages,
        "ideal_s": ideal,
        "step_s": step,
        "bubble": step / ideal - 1,
        "bubble_theory": float(theory),
        "held": [got[rank][1] for rank in range(ranks)],
        "held_theory": [peak_in_flight(schedule, rank, **sizes) for rank in range(ranks)],
    }


def fits(row: dict[str, Any]) -> bool:
    """Whether a schedule does what theory says."""
    near = abs(row["bubble"] - row["bubble_theory"]) <= TOLERANCE * row["bubble_theory"]
    return bool(near and row["held"] == row["held_theory"])


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{figures['ranks']} ranks, {figures['microbatches']} microbatches; bubble = idle / ideal time; held = most "
        "activations of one microbatch on one stage, by rank",
        f"{'schedule':<18}{'v':>3}{'bubble':>9}{'theory':>9}{'off':>7}   held (theory)",
    ]
    for row in figures["schedules"]:
        theory = row["bubble_theory"]
        off = row["bubble"] / theory - 1
        lines.append(
            f"{row['schedule']:<18}{row['stages_per_rank']:>3}{row['bubble']:>9.4f}{theory:>9.4f}{off:>+7.1%}   "
            f"{row['held']} ({row['held_theory']}){'' if fits(row) else '  MISSED'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_bubble", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--work-ms", type=float, default=800.0, help="of each of a rank's forward and two backwards")
    parser.add_argument("--json", action="store_true", help="print the figures, and what they were measured on")
    settings = parser.parse_args()
    figures = run(ranks=settings.ranks, microbatches=settings.microbatches, work_s=settings.work_ms / 1000)
    print(table(figures))
    if settings.json:
        from benchmarks.__main__ import circumstances

        print(json.dumps({**circumstances(), **figures}))
    return 0 if all(fits(row) for row in figures["schedules"]) else 1


if __name__ == "__main__":
    sys.exit(main())
