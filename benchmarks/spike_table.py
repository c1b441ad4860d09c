"""What both rules of the spike detector do in known situations: ``python -m benchmarks.spike_table [--out FILE]``.

Prints, as Markdown, the update at which each rule fires (or that it stays silent), its false alarms on heavy-tailed
noise (Student's t, 3 degrees), and what it says of recorded loss curves of real runs. No torch; seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_pretrain.spikes import MeanRule, RobustRule, SpikeDetector, SpikeRule

RULES: dict[str, SpikeRule] = {"robust": RobustRule(), "mean (4 x)": MeanRule()}
DATA = Path(__file__).parents[1] / "tests" / "data"
CURVES = (
    "curve_llama_1m_300_updates.csv",
    "curve_llama_1m_1900_updates.csv",
    "curve_llama_1m_every_update.csv",
    "curve_classifier_every_update.csv",
)
NOISE = 0.05  # sigma, nats
AT = 200  # the update at which something happens


def noisy(levels: Sequence[float], *, seed: int = 1, sigma: float = NOISE) -> list[float]:
    """Levels with Gaussian noise."""
    return (np.asarray(levels) + sigma * np.random.default_rng(seed).standard_normal(len(levels))).tolist()


def scenarios() -> dict[str, tuple[list[float], list[float] | None, str]]:
    """Losses, gradient norms and what is wanted, by name."""
    flat, n = [3.0] * 400, 400
    start = [6.0 + 5.0 * math.exp(-i / 60) for i in range(n)]
    jump = noisy([3.0] * AT + [4.0] * AT)
    nan = noisy(flat)
    nan[AT] = math.nan
    norms = noisy([1.0] * n, seed=2, sigma=0.1)
    gradient = [*norms[:AT], *[40.0] * 5, *norms[AT + 5 :]]
    explosion = noisy([3.0] * AT + [14.0] * AT)
    early = noisy([11.0] * n)
    early[1] = math.inf
    again = noisy([3.0] * n)
    for at in (200, 230, 260):
        again[at : at + 4] = [9.0] * 4
    return {
        "noisy start, 11 down to 6 (sigma 0.3)": (noisy(start, sigma=0.3), None, "silent"),
        "sudden improvement, 3.0 to 2.0": (noisy([3.0] * AT + [2.0] * AT), None, "silent"),
        "one odd batch, + 1 nat": ([*noisy(flat)[:AT], 4.0, *noisy(flat)[AT + 1 :]], None, "silent"),
        "+ 1 nat that lasts": (jump, None, f"fires from {AT}"),
        "slow drift, + 10% a step": (
            noisy([3.0] * AT + [3.0 * 1.1**i for i in range(1, 30)]),
            None,
            f"fires from {AT}",
        ),
        "explosion, 3 to 14": (explosion, None, f"fires from {AT}"),
        "a single NaN": (nan, None, f"fires at {AT}"),
        "infinity at the second update, before any snapshot": (early, None, "fires at 1"),
        "gradient norm x 40, loss as ever": (noisy(flat), gradient, f"fires from {AT}"),
        "the same bad batches at 200, 230 and 260": (again, None, "fires three times"),
    }


def fired(rule: SpikeRule, losses: Sequence[float], norms: Sequence[float] | None) -> list[int]:
    """Updates that spiked; the first of each row of neighbours."""
    detector = SpikeDetector(rule)
    spikes = [
        i
        for i, loss in enumerate(losses)
        if detector.observe(loss, step=i, grad_norm=None if norms is None else norms[i]).is_spike
    ]
    return [i for i in spikes if i - 1 not in spikes]


def false_alarms(rule: SpikeRule, *, updates: int, seed: int) -> int:
    """Spikes on a flat curve with heavy-tailed noise."""
    losses = 3.0 + NOISE * np.random.default_rng(seed).standard_t(3, updates)
    return len(fired(rule, losses.tolist(), None))


def recorded(name: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a real run."""
    with (DATA / name).open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows], [float(row["grad_norm"]) for row in rows]


def run(updates: int = 20_000) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"scenarios": {}, "false_alarms": {}, "recorded": {}}
    for name, (losses, norms, wanted) in scenarios().items():
        found["scenarios"][name] = {"wanted": wanted} | {key: fired(r, losses, norms) for key, r in RULES.items()}
    found["false_alarms"] = {"updates": updates} | {
        k: false_alarms(r, updates=updates, seed=3) for k, r in RULES.items()
    }
    for name in CURVES:
        losses, norms = recorded(name)
        found["recorded"][name] = {"points": len(losses)} | {
            key: len(fired(r, losses, norms)) for key, r in RULES.items()
        }
    return found


def table(found: dict[str, Any]) -> str:
    """As Markdown."""

    def said(updates: list[int]) -> str:
        return "silent" if not updates else f"fires at {', '.join(map(str, updates[:4]))}"

    names = list(RULES)
    lines = ["| situation | wanted | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for name, row in found["scenarios"].items():
        lines.append(f"| {name} | {row['wanted']} | " + " | ".join(said(row[key]) for key in names) + " |")
    alarms = found["false_alarms"]
    cells = " | ".join(f"{alarms[key]} in {alarms['updates']:,}" for key in names)
    lines.append(f"| false alarms, Student's t with 3 degrees | none | {cells} |")
    for name, row in found["recorded"].items():
        cells = " | ".join(f"{row[key]} alarms" for key in names)
        lines.append(f"| recorded: {name} ({row['points']} points) | none | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = run()
    print(table(found))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
