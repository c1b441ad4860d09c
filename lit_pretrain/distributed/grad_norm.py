"""The L2 norm of gradients, in true units and over everything that is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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


def _local(gradient: Tensor) -> tuple[_Cut, Tensor]:
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(isinstance(p, Partial) for p in gradient.placements):
        gradient = gradient.redistribute(
            placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        )
    dims = tuple(i for i, p in enumerate(gradient.placements) if isinstance(p, Shard))
    return (gradient.device_mesh, dims), gradient.to_local()


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    # A sum of squares in 16 bits would round away small gradients and overflow on large ones.
    return torch.nn.utils.get_total_norm(
        [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in tensors]
    )
