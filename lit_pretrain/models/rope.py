"""Rotary position embedding: the table of angles and the rotation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_pretrain.models.norms import is_eager_cpu
from lit_pretrain.specs import GPTConfig, RopeScaling


def inverse_frequencies(head_size: int, *, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a token per pair of features, (head_size / 2,), float32 on the CPU.

    Args:
        head_size: Width of a head; even.
        base: Base of the geometric series.
        scaling: Stretch, or None.

    Source: Su et al. 2021, section 3.2.2; Chen et al. 2023 (linear); Llama 3.1 (llama3).
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    frequency = 1.0 / (base**exponent)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2.0 * math.pi / frequency
    longest_kept = scaling.original_block_size / scaling.high_freq_factor
    shortest_stretched = scaling.original_block_size / scaling.low_freq_factor
    share = (scaling.original_block_size / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1.0 - share) * frequency / scaling.factor + share * frequency
    stretched = torch.where(wavelength > shortest_stretched, frequency / scaling.factor, frequency)
    is_between = (wavelength >= longest_kept) & (wavelength <= shortest_stretched)
    return torch.where(is_between, between, stretched)


class RotaryTable:
    """Cosines and sines of every position, made on first use and kept outside the state dict.

    Angles are float32 whatever the model's dtype: published models were trained that way, and the same arithmetic
    gives the same logits. A plain object and no buffer, so a model built on the meta device has nothing to repair.

    Args:
        config: An architecture with ``position="rope"``.
    """

    def __init__(self, config: GPTConfig) -> None:
        self.block_size = config.block_size
        self.inverse_frequencies = inverse_frequencies(
            config.head_size, base=config.rope_base, scaling=config.rope_scaling
        )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (device, dtype)
        if key in self._tables:
            return self._tables[key]
        # An inference tensor left in the cache by a validation step could not be saved for a later backward.
        with torch.inference_mode(False):
            positions = torch.arange(self.block_size, dtype=torch.float32, device="cpu")
            angles = positions[:, None] * self.inverse_frequencies
            table = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        if type(table[0]) is Tensor:  # a fake tensor of a rehearsal must not outlive its mode
            self._tables[key] = table
        return table

    def __call__(
        self, positions_BT: Tensor | None, *, start: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines that broadcast against (B, T, H, D/2).

        Args:
            positions_BT: Position of each token, or None for ``start, start + 1, ...``.
            start: First position where ``positions_BT`` is None.
            length: Tokens.
            device: Where the rotation happens.
            dtype: Of the rotation; float32 for 16-bit models.
        """
        cos, sin = self._table(device, dtype)
        if positions_BT is None:
            window = slice(start, start + length)
            return cos[window, None, :], sin[window, None, :]
        return cos[positions_BT][:, :, None, :], sin[positions_BT][:, :, None, :]


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature pairs ``(i, i + D/2)`` of each head by their angles (the half-split layout).

    Args:
        x_BTHD: Queries or keys.
        cos: From ``RotaryTable``.
        sin: From ``RotaryTable``.

    Returns:
        (B, T, H, D) in the dtype of ``x_BTHD``; 16-bit inputs are rotated in float32.
    """
    if x_BTHD.dtype == cos.dtype and is_eager_cpu(x_BTHD):
        out: Tensor = _CPURotation.apply(x_BTHD, cos, sin)  # type: ignore[no-untyped-call]
        return out
    first, second = x_BTHD.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BTHD.dtype)


class _CPURotation(torch.autograd.Function):
    """The same rotation in fewer passes over memory; backward turns by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_into_new(x_BTHD, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_into_new(grad_BTHD, cos, sin, sign=-1.0), None, None


def _rotate_into_new(x_BTHD: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    # Whole heads at a time: passes over half heads leave the vector units idle and take 2.5 times as long.
    cos_D, sin_D = torch.cat((cos, cos), dim=-1), torch.cat((-sign * sin, sign * sin), dim=-1)
    return torch.roll(x_BTHD, x_BTHD.shape[-1] // 2, dims=-1).mul_(sin_D).addcmul_(x_BTHD, cos_D)
