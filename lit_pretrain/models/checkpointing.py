"""Activation checkpointing of one block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Literal["none", "selective", "full"]

# Results that are dear to compute and cheap to keep: matrix products and attention.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_KEPT = frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name))


def _keep_products(_ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def run_checkpointed(function: Callable[..., Tensor], *args: Any, mode: ActivationCheckpointing) -> Tensor:
    """``function(*args)``, forgetting activations that backward computes again; dropout draws the same masks.

    Args:
        function: One block's forward.
        args: Its arguments.
        mode: ``none`` keeps all, ``selective`` keeps matrix products and attention, ``full`` keeps the inputs only.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, **extra)
    return out
