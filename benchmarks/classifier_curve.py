"""Records the loss curve of a classifier that learns its data by heart: ``python -m benchmarks.classifier_curve FILE``.

The other end of what a spike detector meets: no noise of 0.05 around 3, but losses that fall to almost nothing and
then scatter by factors of hundreds. ``tests/data/curve_classifier_every_update.csv`` is one of these.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, FEATURES, ROWS, BATCH, WIDTH = 10, 20, 4000, 32, 128


def record(*, updates: int, seed: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every update of a perceptron on clouds that overlap a little."""
    torch.manual_seed(seed)
    centres = 0.5 * torch.randn(CLASSES, FEATURES)
    labels = torch.randint(CLASSES, (ROWS,))
    inputs = centres[labels] + 0.45 * torch.randn(ROWS, FEATURES)
    net = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    found: list[tuple[float, float]] = []
    while len(found) < updates:
        for rows in torch.randperm(ROWS).split(BATCH):
            loss = cross_entropy(net(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            optimizer.step()
            found.append((loss.item(), norm.item()))
    return found[:updates]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("file", type=Path)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    with args.file.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "loss", "grad_norm"])
        for step, (loss, norm) in enumerate(record(updates=args.updates, seed=args.seed)):
            writer.writerow([step, f"{loss:.4g}", f"{norm:.4g}"])


if __name__ == "__main__":
    main()
