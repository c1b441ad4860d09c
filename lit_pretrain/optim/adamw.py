"""AdamW with the settings of language model pretraining."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.optim.groups import parameter_groups

# Device types with a fused kernel in torch 2.13. torch itself looks only at the first step, after a run has started.
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def adamw(
    model: nn.Module,
    *,
    lr: float = 3e-4,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """AdamW over ``parameter_groups(model)``.

    Bind the settings with ``functools.partial`` and call the result with a model.

    Args:
        model: Any module.
        lr: Peak learning rate; a schedule scales it.
        betas: Decay of the first and second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices.
        fused: One kernel for the whole update; None means where torch has one for these parameters.

    Raises:
        ConfigError: A value is out of range, nothing is trainable, or ``fused=True`` is impossible here.

    Source: Loshchilov and Hutter 2019; GPT-3 (Brown et al. 2020, appendix B) for betas and decay.
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"optimizer.{name}={value!r} must be a finite number of at least 0.")
    if not 0.0 < eps < math.inf:
        raise ConfigError(f"optimizer.eps={eps!r} must be a finite number above 0.")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(
            f"optimizer.betas={list(betas)} must be two numbers of at least 0 and below 1, such as [0.9, 0.95]."
        )
    groups = parameter_groups(model, weight_decay=weight_decay)
    if not groups:
        raise ConfigError("The optimizer got a model without trainable parameters; unfreeze some.")

    possible = all(
        parameter.device.type in FUSED_DEVICES and parameter.is_floating_point()
        for group in groups
        for parameter in group["params"]
    )
    if fused and not possible:
        kinds = sorted({f"{p.dtype} on {p.device.type}" for group in groups for p in group["params"]})
        raise ConfigError(
            f"optimizer.fused=true, but torch has no fused AdamW for parameters that are {', '.join(kinds)}; "
            f"use optimizer.fused=null."
        )
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=(float(betas[0]), float(betas[1])),
        eps=eps,
        fused=possible if fused is None else fused,
    )
