"""What has to be known of gradients before they may be used; sharded ones by their local part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_pretrain.plugins import _compat


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Local parts of the gradients, in the optimizer's order; they share memory with the gradients."""
    found = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [_in_memory(g) for g in found if g is not None]


@torch.no_grad()
def unscale(gradients: Sequence[Tensor], *, scale: float, device: torch.device) -> Tensor:
    """Divide gradients by a scale in place, and look whether all of them are finite. Never waits for the device.

    Args:
        gradients: Plain tensors; of mixed types and devices.
        scale: A power of two; 1 only looks.
        device: Of the answer.

    Returns:
        1 where anything is inf or NaN on this rank, else 0: 0-d, float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for tensors in _by_kind(gradients):
        found = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        if scale == 1.0:
            # Largest magnitude, NaN if there is one: reads without writing.
            greatest = torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
            found = (~torch.isfinite(greatest)).float()
        else:
            _compat.multiply_and_check(tensors, 1.0 / scale, found)
        total = torch.maximum(total, found.to(device))
    return total


def agree(found: Tensor, *, world_size: int) -> Tensor:
    """1 on every rank where it is 1 on any, over all axes. Every rank calls it; changed in place."""
    if world_size > 1 and dist.is_available() and dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


@torch.no_grad()
def underflow(gradients: Sequence[Tensor], *, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How many scaled gradients a 16-bit type holds with less than its precision, or not at all.

    Args:
        gradients: Still scaled.
        scale: That they carry.
        dtype: The 16-bit type. Below its smallest normal number it loses bits, then everything.
        device: Of the answer.

    Returns:
        Counts (3,), float64: below that number as they are; below it once unscaled; all. Zeros are below.
    """
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    tiny = torch.finfo(dtype).smallest_normal
    for g in gradients:
        size = g.abs()
        low, lost = (size < tiny).sum(), (size < tiny * scale).sum()
        counts += torch.stack([low, lost, torch.full_like(low, g.numel())]).to(device, torch.float64)
    return counts


def share(counts: Tensor, *, world_size: int) -> tuple[float, float]:
    """Shares of the first two counts of :func:`underflow` over all ranks. Every rank calls it; waits for the device."""
    if world_size > 1 and dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)
    low, lost, total = counts.tolist()
    return (low / total, lost / total) if total else (0.0, 0.0)


def first_non_finite(module: nn.Module, *, world_size: int) -> str:
    """Name of the first parameter, in the module's order, whose gradient is not finite. Every rank calls it."""
    mine = next((name for name, p in module.named_parameters() if p.grad is not None and not _is_finite(p.grad)), None)
    everyone: list[str | None] = [mine]
    if world_size > 1 and dist.is_available() and dist.is_initialized():
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine)
    return next((name for name in everyone if name is not None), "a parameter outside the module")


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(_in_memory(gradient)).all())


def _in_memory(gradient: Tensor) -> Tensor:
    return _compat.dense(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups that one kernel can take. A rank may hold nothing of a small parameter, and nothing has no maximum."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
