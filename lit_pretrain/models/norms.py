"""Normalisation layers, computed in float32 for 16-bit inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_pretrain.specs import GPTConfig


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    16-bit inputs are normalised and scaled in float32 and rounded once, at the end.

    Args:
        size: Width of the last dimension.
        eps: Added to the mean square.

    Source: Zhang and Sennrich 2019, section 3.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, same shape and dtype as ``x``."""
        if x.dtype in (torch.float16, torch.bfloat16):
            y = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
            return y.to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(config: GPTConfig, size: int) -> nn.Module:
    """The normalisation that ``config.norm`` names, over ``size`` features.

    Args:
        config: The architecture.
        size: Width of the last dimension.
    """
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)
