"""The private torch names that the engine needs, in one place. Torch 2.13."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes


def replicate(module: nn.Module, *, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Plain data parallelism on FSDP's machinery; can go when torch gives it a public home.

    Args:
        module: Changed in place.
        mesh: One dimension.
        policy: Never None: the function does not look at it before use.
    """
    _replicate(module, mesh=mesh, mp_policy=policy)


def is_strided(placement: Any) -> bool:
    """Whether data parallelism cuts what tensor parallelism has cut along the same dimension already.

    Such a placement is no ``Shard``: FSDP over tensor parallelism makes it, and torch has no public name for it.
    """
    return isinstance(placement, _StridedShard)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several mesh dimensions as one; the method is private although torch's own trainers use it."""
    return mesh._flatten(name)


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Meshes of one or more dimensions as one, also where a dimension was flattened; slicing those by name warns."""
    return DeviceMesh._concatenate(meshes)


def unobserved() -> AbstractContextManager[Any]:
    """Nothing watches single operations inside: selective checkpointing, for one, keeps results of matrix products.

    It would keep scores of attention, which are changed in place and fill the memory that the ring is there to save.
    """
    return _disable_current_modes()
