"""Normalisation layers, computed in float32 for 16-bit inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
            narrow: Tensor = y.to(x.dtype)
            return narrow
        if is_eager_cpu(x) and type(self.weight) in (nn.Parameter, Tensor):
            out: Tensor = _CPURMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return out
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def is_eager_cpu(x: Tensor) -> bool:
    """A plain tensor on the CPU, not being compiled: where fewer passes over memory pay."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


class _CPURMSNorm(torch.autograd.Function):
    """``F.rms_norm`` has no CPU kernel and is put together of small operations; this takes two thirds of its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product_NC = (grad * normed).reshape(-1, x.shape[-1])
        # y = normed * weight, so d x = scale * (g - normed * mean(g * normed)) with g = grad * weight.
        mean = torch.mv(product_NC, weight).div_(x.shape[-1]).view(scale.shape)
        grad_x = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
        # A product with ones sums over rows faster than sum(dim=0).
        grad_weight = torch.mv(product_NC.t(), product_NC.new_ones(product_NC.shape[0]))
        return grad_x, grad_weight, None


def build_norm(config: GPTConfig, size: int) -> nn.Module:
    """The normalisation that ``config.norm`` names, over ``size`` features.

    Args:
        config: The architecture.
        size: Width of the last dimension.
    """
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)
