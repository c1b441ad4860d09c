"""The L2 norm of gradients, in true units and over everything that is sharded, and what is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

# Which mesh a gradient lives on and the mesh dimensions that cut it; None for a plain tensor.
_Cut = tuple[DeviceMesh, tuple[int, ...]] | None


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients together, a 0-d tensor, at least float32, on the first gradient's device.

    Plain tensors count as they are: under data parallelism they hold the already reduced gradient, alike on every
    rank. DTensors are summed from their local shards and reduced over just the mesh dimensions that shard them, so
    meshes may be mixed, and replicated values count once. With sharded gradients every rank of their meshes must
    call it; without, it does not communicate. It never waits for the device.

    Args:
        gradients: None of them None; the same order on every rank.

    Returns:
        The norm; 0 (float32, on the CPU) for no gradients.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    home = gradients[0].device
    parts: dict[_Cut, list[Tensor]] = {}
    for gradient in gradients:
        cut, local = _local(gradient)
        parts.setdefault(cut, []).append(local)
    if list(parts) == [None]:
        return _norm(parts[None]).to(home)
    squares = []
    for cut, tensors in parts.items():
        square = _norm(tensors).to(home).square()
        for dim in () if cut is None else cut[1]:
            assert cut is not None
            dist.all_reduce(square, group=cut[0].get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, whatever their layout; nothing is communicated.

    Args:
        gradients: Plain or sharded, of mixed meshes, types and devices.
        factor: 0-d, the same on every rank.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        # One operation over sharded tensors of several meshes is refused by torch; their local parts are plain.
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        kinds.setdefault((local.dtype, local.device), []).append(local)
    for (dtype, device), tensors in kinds.items():
        torch._foreach_mul_(tensors, factor.to(device=device, dtype=dtype))


@torch.no_grad()
def clip_to_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients down so that their known norm becomes at most ``max_norm``; never up. Waits for nothing.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: Above 0.
        norm: From :func:`global_norm` over the same gradients.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # the guard of torch's own clipping, so that results agree
    scale_gradients((p.grad for p in parameters if p.grad is not None), factor)


def _local(gradient: Tensor) -> tuple[_Cut, Tensor]:
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(isinstance(p, Partial) for p in gradient.placements):
        gradient = gradient.redistribute(
            placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        )
    # Not `isinstance(p, Shard)`: what is cut twice along one dimension has a placement of another class.
    dims = tuple(i for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate))
    return (gradient.device_mesh, dims), gradient.to_local()


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    # A sum of squares in 16 bits would round away small gradients and overflow on large ones.
    return torch.nn.utils.get_total_norm(
        [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in tensors]
    )
