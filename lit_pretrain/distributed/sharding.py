"""The stages of ZeRO as flags on one mechanism: torch's FSDP2.

Source: Rajbhandari et al. 2020, section 5; Zhao et al. 2023.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lit_pretrain.distributed import _compat
from lit_pretrain.errors import ConfigError

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Zero:
    """What data-parallel ranks share.

    Args:
        stage: 0 replicates everything; 1 shards optimizer states; 2 also accumulated gradients; 3 also parameters,
            gathered unit by unit for each forward and each backward pass.

    Raises:
        ConfigError: Another stage.
    """

    stage: int

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"strategy.stage={self.stage!r} must be one of 0, 1, 2, 3.")

    def shard(
        self, module: nn.Module, *, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, is_root: bool = False
    ) -> None:
        """Make what a module holds one unit of sharding, in place; its class gains ``FSDPModule``.

        Parts of it that are units already stay units of their own: the root comes last. Every rank calls it; nothing
        is communicated. Weights have to be equal on all ranks of the mesh, or on the meta device.

        Args:
            module: Gathered and freed as one.
            mesh: One dimension; two, replicate x shard, for hybrid sharding.
            policy: Types of parameters and of reduced gradients; None leaves them as they are.
            is_root: It holds all the other units.
        """
        policy = policy or MixedPrecisionPolicy()
        if self.stage == 0:
            _compat.replicate(module, mesh=mesh, policy=policy)
        else:
            # The root's parameters are wanted again as soon as its forward is over: backward begins with them.
            again = self.stage == 3 and not is_root
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)

    def set_accumulating(self, root: nn.Module, *, accumulating: bool) -> None:
        """Say whether the next backward pass is one inside an accumulation window, or the one that ends it.

        Inside a window stages 0 and 1 keep whole gradients and reduce them once, at its end; stages 2 and 3 reduce
        every time, since whole gradients are what they save. Stages 1 and 2 keep gathered parameters until then.

        Args:
            root: The root of the sharded module.
            accumulating: Whether more microbatches of this update follow.
        """
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(not accumulating or self.stage >= 2)
        root.set_is_last_backward(not accumulating)
        if self.stage in (1, 2):
            root.set_reshard_after_backward(not accumulating)


def make_entry_point(root: nn.Module, name: str) -> None:
    """Let a method of the root count as a forward pass: parameters are gathered before it.

    Without gradients everything is freed after it, so that between steps the parameters to be seen are always the
    trained ones; and it runs outside inference mode, under which FSDP would spoil the training steps that follow.

    Args:
        root: Sharded.
        name: Of the method.
    """
    original = getattr(root, name)
    register_fsdp_forward_method(root, name)
    gathered = getattr(root, name)

    @functools.wraps(original)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return gathered(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            out = gathered(*args, **kwargs)
        reshard(root)
        return out

    setattr(root, name, entry)


def reshard(root: nn.Module) -> None:
    """Free whatever is gathered. No communication."""
    for module in sharded_modules(root):
        module.reshard()


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """The root and its units, outer ones first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
