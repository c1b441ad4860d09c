"""Which parameters are decayed."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups ``decay`` and ``no_decay``, each with a ``name``; an empty one is left out.

    Matrices are decayed, embeddings included, as in the usual recreations of GPT-2 and GPT-3; biases, norms and other
    vectors and scalars are not. Frozen parameters are left out and a tied weight appears once.

    Args:
        model: Any module.
        weight_decay: Of the ``decay`` group.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = (
        {"name": "decay", "params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
