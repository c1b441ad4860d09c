"""Every layout against one process in float64: ``python -m benchmarks.parity [--only TEXT ...] [--out FILE]``.

Compares losses, the gradient norm, every gradient and the updated weights over 10 updates, with clipping active and
masked targets. Prints a table, writes it as JSON, and exits with 1 where a difference is above the bound of
max|difference| <= 1e-12 max(1, max|value|).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.__main__ import circumstances
from lit_pretrain.schedules.pipeline import SCHEDULES
from tests.support.parity import BOUND, differences, share_of, train
from tests.support.ranks import RankPool

UPDATES = 10
CHUNK = 6  # layouts that one set of processes trains one after the other


@dataclass(frozen=True)
class Layout:
    """Ranks, the settings of a HybridParallelStrategy, and the size of what is trained.

    Args:
        ranks: In all.
        strategy: Settings.
        layers: Of the model.
        rows: Sequences of a global batch.
    """

    ranks: int
    strategy: dict[str, Any]
    layers: int = 2
    rows: int = 12


def pipeline(ranks: int, *, layers: int, schedule: str = "1f1b", others: int = 1, **settings: Any) -> Layout:
    """A pipeline of ``ranks``, times ``others``, whose batches have as many rows as the longest schedule needs."""
    microbatches = 2 * ranks
    data = settings.pop("data", 1)
    strategy = {"pipeline_parallel_size": ranks, "schedule": schedule, "num_microbatches": microbatches, **settings}
    return Layout(ranks * others * data, strategy, layers=layers, rows=3 * microbatches * data)


LAYOUTS: dict[str, Layout] = {
    **{f"zero{stage} x {world}": Layout(world, {"stage": stage}) for world in (2, 4) for stage in range(4)},
    **{f"tp{n}": Layout(n, {"tensor_parallel_size": n, "sequence_parallel": False}) for n in (2, 4)},
    **{f"tp{n} sequence": Layout(n, {"tensor_parallel_size": n, "sequence_parallel": True}) for n in (2, 4)},
    **{f"zero{stage} x 2, tp2": Layout(4, {"tensor_parallel_size": 2, "stage": stage}) for stage in range(4)},
    "zero3 2 x 2 hybrid": Layout(4, {"stage": 3, "replicate_size": 2}),
    **{f"pp2 {name}": pipeline(2, layers=4, schedule=name) for name in SCHEDULES},
    **{f"pp3 {name}": pipeline(3, layers=8, schedule=name) for name in SCHEDULES},
    **{f"pp4 {name}": pipeline(4, layers=8, schedule=name) for name in SCHEDULES},
    "zero2 x 2, pp2 1f1b": pipeline(2, layers=4, data=2, stage=2),
    "zero3 x 2, pp2 zbv": pipeline(2, layers=4, data=2, stage=3, schedule="zbv"),
    **{
        f"dp2 pp2 tp2 {name}": pipeline(2, layers=4, data=2, others=2, tensor_parallel_size=2, schedule=name)
        for name in ("1f1b", "zbv")
    },
    **{f"cp{n}": Layout(n, {"context_parallel_size": n}) for n in (2, 4)},
    **{f"zero{stage} x 2, cp2": Layout(4, {"context_parallel_size": 2, "stage": stage}) for stage in (0, 3)},
    "cp2 tp2": Layout(4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "cp2 hybrid 2 x 2": Layout(8, {"context_parallel_size": 2, "replicate_size": 2, "shard_size": 2, "stage": 3}),
    "dp2 pp2 cp2": pipeline(2, layers=4, data=2, others=2, context_parallel_size=2),
    "dp2 pp2 cp2 zbv": pipeline(2, layers=4, data=2, others=2, context_parallel_size=2, schedule="zbv", stage=3),
    "pp2 tp2 cp2": pipeline(2, layers=4, others=4, context_parallel_size=2, tensor_parallel_size=2),
}
"""Every layout by name."""

MODELS = [
    {"style": style, "tied": tied, "accumulate": accumulate}
    for style in ("gpt2", "llama")
    for tied in (True, False)
    for accumulate in (1, 3)
]


def fits(strategy: dict[str, Any], model: dict[str, Any]) -> bool:
    """The untied LLaMA has 2 heads of keys and values."""
    return not (strategy.get("tensor_parallel_size") == 4 and model["style"] == "llama" and not model["tied"])


@functools.cache
def reference(style: str, tied: bool, accumulate: int, layers: int, rows: int) -> dict[str, Any]:
    """The same training in this process alone."""
    return train("auto", style=style, tied=tied, accumulate=accumulate, updates=UPDATES, layers=layers, rows=rows)


def several(world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What one rank has after each training."""
    return [train(strategy, devices=world, updates=UPDATES, **model) for strategy, model in cases]


def compare(names: list[str], pool: RankPool) -> list[dict[str, Any]]:
    """A row per layout and model: the greatest difference on any rank."""
    rows = []
    for world in sorted({layout.ranks for layout in LAYOUTS.values()}):
        cases = [
            (name, layout.strategy, {**model, "layers": layout.layers, "rows": layout.rows})
            for name, layout in LAYOUTS.items()
            for model in MODELS
            if name in names and layout.ranks == world and fits(layout.strategy, model)
        ]
        for start in range(0, len(cases), CHUNK):
            part = cases[start : start + CHUNK]
            began = time.monotonic()
            results = pool(world, several, world, [case[1:] for case in part], timeout_s=600.0)
            for i, (name, _, model) in enumerate(part):
                want = reference(**model)
                assert set().union(*(result[i]["weights"] for result in results)) == set(want["weights"])
                found = [differences(result[i], share_of(want, result[i])) for result in results]
                row = {kind: max(f[kind] for f in found) for kind in found[0]}
                rows.append({"layout": name, **model, **row, "ok": all(v <= BOUND for v in row.values())})
                print(line(rows[-1]), flush=True)
            print(f"  ({len(part)} layouts in {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    head = f"{row['layout']:<24}{row['style']:<7}{'tied' if row['tied'] else 'untied':<8}{row['accumulate']:>2}"
    figures = "".join(f"{row[kind]:>11.1e}" for kind in ("loss", "norm", "gradients", "weights"))
    return f"{head}{figures}  {'ok' if row['ok'] else 'FAILED'}"


def main() -> int:
    """Compare and say whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="layouts whose name holds one of these")
    parser.add_argument("--out", type=Path, default=Path("outputs/parity.json"))
    arguments = parser.parse_args()
    names = [n for n in LAYOUTS if not arguments.only or any(text in n for text in arguments.only)]
    if not names:
        parser.error(f"no layout holds {arguments.only}; there are {', '.join(LAYOUTS)}")
    print(f"{'layout':<24}{'style':<7}{'head':<8}{'of':>2}{'loss':>11}{'norm':>11}{'gradients':>11}{'weights':>11}")
    pool = RankPool()
    try:
        rows = compare(names, pool)
    finally:
        pool.close()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {**circumstances(), "bound": BOUND, "updates": UPDATES, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} comparisons, {failed} failed; figures: {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Functions that ranks run are found by their module's name, which must not be __main__.
    from benchmarks import parity

    sys.exit(parity.main())
