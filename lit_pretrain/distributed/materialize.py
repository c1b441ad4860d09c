"""Weights before they are split: the same on every rank, whether they exist yet or not."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import LazyParameters


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter has no memory yet."""
    return any(p.is_meta for p in module.parameters())


@torch.no_grad()
def copy_from_rank_zero(module: nn.Module, *, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, one at a time. Every rank calls it.

    Args:
        module: With memory on every rank.
        device: Where the process group's backend communicates.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().to(device)
        dist.broadcast(moved, src=0)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)


def check_can_materialize(module: nn.Module) -> None:
    """Refuse a module on the meta device whose weights nobody can make.

    Raises:
        ConfigError: Naming the first layer that cannot.
    """
    if not is_on_meta(module) or isinstance(module, LazyParameters):
        return
    for name, layer in module.named_modules():
        own = any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False))
        if own and not hasattr(layer, "reset_parameters"):
            raise ConfigError(
                f"{type(module).__name__} is on the meta device, but its layer {name or 'itself'} "
                f"({type(layer).__name__}) has no reset_parameters; give the module an initialize_parameters method "
                "(lit_pretrain.specs.LazyParameters), or build it on a real device."
            )


def materialize(part: nn.Module, *, name: str, device: torch.device, seed: int) -> None:
    """Give what is on the meta device memory and weights, before it is split. Nothing is communicated.

    Each layer draws from a generator that depends on its name and the seed alone, so all ranks and all layouts agree.

    Args:
        part: Of a module, or all of it; what has memory is left alone.
        name: Of the part in the whole.
        device: Where its memory is.
        seed: The same on every rank.
    """
    for inner, layer in part.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if not any(t.is_meta for t in tensors):
            continue
        layer.to_empty(device=device, recurse=False)
        full = ".".join(piece for piece in (name, inner) if piece)
        digest = hashlib.sha256(f"{seed}:{full}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            reset = layer.reset_parameters
            assert callable(reset)  # check_can_materialize
            reset()
