"""A small state of every kind of tensor, and how to write it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lit_pretrain.distributed.checkpoint import CheckpointFacts, write_checkpoint

FACTS = CheckpointFacts(
    global_step=250, microbatches_read=1000, updates_read=250, reason="best", monitors={"val/loss": 2.5, "x": math.inf}
)


def state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=g)
    return {
        "model.wte.weight": weight,
        "model.head.weight": weight,  # tied
        "model.half": torch.randn(7, generator=g).to(torch.bfloat16),
        "model.transposed": torch.randn(5, 3, generator=g).T,
        "model.view": torch.randn(100, generator=g)[10:12],
        "model.count": torch.tensor(3),
        "model.empty": torch.empty(0, 4),
        "model.nan": torch.tensor([math.nan, math.inf, -0.0]),
        "optimizer.0.step.wte.weight": torch.tensor(17.0),
    }


def write(folder: Path, *, step: int | None = None, **changes) -> CheckpointFacts:
    facts = FACTS if step is None else CheckpointFacts(global_step=step, updates_read=step)
    given = {
        "tensors": state(),
        "tree": {"epoch": 1},
        "rng": [{"python": (3, (1, 2), None)}],
        "facts": facts,
        **changes,
    }
    return write_checkpoint(folder, **given)


def bits(tensor: torch.Tensor) -> tuple:
    """Equal for the same dtype, shape and bytes: nan equals nan, and 0 is not -0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
