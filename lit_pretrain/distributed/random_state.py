"""Which ranks draw the same random numbers.

The contract: what is whole on every rank of a tensor-parallel group gets the same dropout mask on all of them; ranks
that hold different data, layers or parts of an activation draw different masks; rank 0 draws what one process would.
Initial weights draw from generators of their own and depend on no layout.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lit_pretrain.distributed.mesh import RankMesh


def align_random_state(mesh: RankMesh, *, sequence_parallel: bool) -> None:
    """Put torch's generators into the state the contract asks for. Every rank calls it.

    Args:
        mesh: The ranks.
        sequence_parallel: Whether activations between layers are split over the tensor-parallel ranks.
    """
    mine: list[Any] = [(torch.initial_seed(), torch.get_rng_state())]
    dist.broadcast_object_list(mine, src=0)
    seed, state = mine[0]
    axes = ("dp_replicate", "dp_shard", "pp", "cp", *(("tp",) if sequence_parallel else ()))
    place = tuple(mesh.coordinate(axis) for axis in axes)
    torch.manual_seed(_mixed(seed, *place) if any(place) else seed)
    if not any(place):
        torch.set_rng_state(state)


def keep_masks_apart(module: nn.Module, *, rank: int) -> None:
    """Let a module that works on this rank's share of an activation draw masks of its own.

    Its numbers follow from one draw of the common generator, which is put back afterwards: the ranks stay in step,
    and a recomputation that restores the common generator finds the same masks.

    Args:
        module: Hooked in place, if it drops anything.
        rank: Place in the tensor-parallel group.
    """
    if not _drops(module):
        return
    saved: list[list[torch.Tensor]] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        if not module.training:
            return
        draw = int(torch.randint(2**62, (), device="cpu"))
        saved.append(_states())
        torch.manual_seed(_mixed(draw, rank))

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        if saved:
            _restore(saved.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _mixed(seed: int, *numbers: int) -> int:
    digest = hashlib.sha256(":".join(map(str, (seed, *numbers))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _drops(module: nn.Module) -> bool:
    for part in module.modules():
        rate = part.p if isinstance(part, nn.Dropout) else getattr(part, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            return True
    return False


def _states() -> list[torch.Tensor]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
