"""Whole states out of sharded ones, and back: any layout can go on from what any other saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from lit_pretrain.distributed import _compat
from lit_pretrain.errors import ConfigError


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: a view, plain."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, *, keep: bool = True) -> Tensor | None:
    """A tensor with nothing sharded, on the CPU. With a sharded one, every rank of its mesh calls it.

    Args:
        tensor: Plain or sharded.
        keep: Whether this rank wants it; the others get None and hold no copy.
    """
    value = tensor.detach()
    if isinstance(value, DTensor):
        strided = [_compat.is_strided(p) for p in value.placements]
        if any(strided):  # what was cut last is joined first; torch would do it in one call, but warns
            placements = [Replicate() if s else p for s, p in zip(strided, value.placements, strict=True)]
            value = value.redistribute(placements=placements)
        value = value.full_tensor()
    return value.cpu().clone() if keep else None


def own_part(value: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, cut as ``like`` is. Nothing is communicated.

    Args:
        value: The whole tensor, the shape of ``like``.
        like: Whose layout to follow.
    """
    mesh, part = like.device_mesh, value
    # What is cut twice along one dimension was cut by tensor parallelism first, then by sharding.
    order = sorted(range(mesh.ndim), key=lambda d: _compat.is_strided(like.placements[d]))
    for d in order:
        placement: Any = like.placements[d]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard) or _compat.is_strided(placement), placement
        pieces = torch.chunk(part, mesh.size(d), dim=placement.dim)
        place = mesh.get_local_rank(d)
        part = pieces[place] if place < len(pieces) else part.narrow(placement.dim, 0, 0)
    return part


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a plain or sharded one of its shape. Nothing is communicated."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(own_part(value, tensor))
    else:
        tensor.copy_(value)


def whole_state_dict(module: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """``module.state_dict()`` with nothing sharded, on the CPU. Every rank calls it.

    Args:
        module: Laid out in any way.
        keep: Whether this rank wants it; the others get an empty one.
    """
    state = module.state_dict()
    out = {name: whole(v, keep=keep) if isinstance(v, Tensor) else v for name, v in state.items()}
    return out if keep else {}


def load_whole_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load what :func:`whole_state_dict` gave. Nothing is communicated; every rank reads the whole state.

    Args:
        module: Laid out in any way.
        state: Whole tensors by name.
        strict: Refuse missing and surplus names.

    Raises:
        ConfigError: A shape differs.
        RuntimeError: A name is missing or surplus; as ``nn.Module.load_state_dict`` says it.
    """
    here = module.state_dict()
    parts: dict[str, Any] = {}
    for name, value in state.items():
        own = here.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape != value.shape:
            raise ConfigError(
                f"The checkpoint's {name} has shape {tuple(value.shape)}, the model's {tuple(own.shape)}; use the "
                "model it was saved from."
            )
        if isinstance(own, DTensor) and isinstance(value, Tensor):
            # Into the parameter's own memory: the sharding keeps views of it.
            assign(own, value)
            parts[name] = own
        else:
            parts[name] = value
    module.load_state_dict(parts, strict=strict)


def whole_optimizer_state(optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """``optimizer.state_dict()`` with nothing sharded, on the CPU. Every rank calls it.

    Args:
        optimizer: Over sharded or plain parameters.
        keep: Whether this rank wants it; the others get an empty one.
    """
    state = optimizer.state_dict()
    entries = {
        index: {key: whole(v, keep=keep) if isinstance(v, Tensor) else v for key, v in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries} if keep else {}


def load_whole_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`whole_optimizer_state` gave, cut as the parameters are. Nothing is communicated.

    Args:
        optimizer: Over the same parameters in the same order.
        state: Whole tensors by the index of their parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {
        index: {key: _as_cut(v, parameters[index]) if isinstance(v, Tensor) else v for key, v in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def _as_cut(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    part = own_part(value, parameter).to(parameter.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
