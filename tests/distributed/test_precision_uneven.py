"""Accumulation windows of unequal lengths, and an overflow that only one rank of two meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lit_pretrain.plugins import MasterWeightPrecision
from tests.support.precisions import Look, Net, batches, by_hand, trainer


def train(overflow: int) -> dict[str, Any]:
    """Both ranks read the same, but for the factor of one batch on the second."""
    import os

    mine = [overflow] if os.environ["RANK"] == "1" else []
    look, plugin = Look(), MasterWeightPrecision("fp16")
    module = Net(batches=batches(5, overflow=mine))
    trainer(devices=2, strategy="ddp", plugins=plugin, callbacks=look, accumulate_grad_batches=2).fit(module)
    dist.barrier()
    return {
        "weights": [p.detach() for p in module.parameters()],
        "scales": look.scales,
        "skipped": plugin.skipped_updates,
    }


@pytest.mark.parametrize(
    ("overflow", "applied", "scales"),
    [
        # Windows of batches (0, 1), (2, 3) and (4): after each batch the scale, in units of 2^15.
        (0, [1, 2], [1, 0.5, 0.5, 0.5, 0.5]),
        (3, [0, 2], [1, 1, 1, 0.5, 0.5]),
        (4, [0, 1], [1, 1, 1, 1, 0.5]),
    ],
)
def test_one_window_is_skipped_on_both(ranks: Any, overflow: int, applied: list[int], scales: list[float]) -> None:
    first, second = ranks(2, train, overflow)
    windows = [batches(5)[2 * i : 2 * i + 2] for i in applied]
    # Each update by hand from where the one before it ended; a window of one batch is weighed like one of two.
    want = _by_hand(windows)
    for got in (first, second):
        assert got["skipped"] == 1
        assert got["scales"] == [s * 2.0**15 for s in scales]
        for a, b in zip(got["weights"], want, strict=True):
            # Scales differ by a power of two, which changes a gradient only where float16 is subnormal.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)


def _by_hand(windows: list[Any]) -> list[torch.Tensor]:
    return by_hand([b for window in windows for b in window], "fp16", accumulate=2, scale=2.0**15)[1][-1]
