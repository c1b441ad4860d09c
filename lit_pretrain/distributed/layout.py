"""Lays a module out over a mesh, in the one order that works: tensor parallelism, units, then the rest.

A pipeline cuts the module before all this; activation checkpointing and compilation live inside the units and come
before it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lit_pretrain.distributed.materialize import check_can_materialize, is_on_meta, materialize
from lit_pretrain.distributed.mesh import RankMesh
from lit_pretrain.distributed.random_state import keep_masks_apart
from lit_pretrain.distributed.sharding import Zero
from lit_pretrain.distributed.tensor_parallel import apply_tensor_parallel, matches
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import LazyParameters, ParallelPlan


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """What to do with a module.

    Args:
        plan: How it can be split.
        mesh: The ranks.
        zero: What data-parallel ranks share.
        device: Where this rank computes.
        sequence_parallel: Split activations between layers along the sequence over the tensor-parallel ranks.
        policy: Types of parameters and reduced gradients in the units.
        root_policy: The same for what is in no unit.
        kept: Patterns of modules that are gathered in ``kept_policy``. In a unit each becomes a unit of its own; what
            is in no unit is gathered as one, since some of it is used without being called: one part of it that is
            kept keeps all.
        kept_policy: Types of those.
        seed: For weights that have no memory yet; the same on every rank.
    """

    plan: ParallelPlan
    mesh: RankMesh
    zero: Zero
    device: torch.device
    sequence_parallel: bool = False
    policy: MixedPrecisionPolicy | None = None
    root_policy: MixedPrecisionPolicy | None = None
    kept: tuple[str, ...] = ()
    kept_policy: MixedPrecisionPolicy | None = None
    seed: int = 0


def lay_out(root: nn.Module, settings: LayoutSettings) -> None:
    """Split and shard a module in place. Every rank calls it; nothing is communicated.

    Weights that exist have to be equal on all ranks. Those on the meta device are made here, so that no rank ever
    holds all of them; they do not depend on the layout.

    Args:
        root: The module.
        settings: How.

    Raises:
        ConfigError: The plan does not fit the module, or its weights cannot be made.
    """
    check_can_materialize(root)
    on_meta, plan, mesh = is_on_meta(root), settings.plan, settings.mesh
    is_lazy = on_meta and isinstance(root, LazyParameters)
    prepare = _maker(root, settings) if on_meta and not is_lazy else None
    if mesh.dims.tp > 1:
        apply_tensor_parallel(
            root,
            plan.tensor_parallel,
            mesh=mesh.tensor,
            sequence_parallel=settings.sequence_parallel,
            prepare=prepare,
        )
        for name, module in root.named_modules():
            if any(matches(name, pattern) for pattern in plan.sharded_dropout):
                keep_masks_apart(module, rank=mesh.coordinate("tp"))
    over = mesh.sharding(replicated=settings.zero.stage == 0)
    kept = _find_kept(root, settings.kept)
    for name, unit in find_units(root, plan.units):
        if prepare is not None:
            prepare(name, unit)
        for inner in [n for n in kept if n == name or n.startswith(f"{name}.")]:
            settings.zero.shard(kept.pop(inner), mesh=over, policy=settings.kept_policy)
        if not isinstance(unit, FSDPModule):
            settings.zero.shard(unit, mesh=over, policy=settings.policy)
    if prepare is not None:
        prepare("", root)
    policy = settings.kept_policy if kept else settings.root_policy or settings.policy
    settings.zero.shard(root, mesh=over, policy=policy, is_root=True)
    if is_lazy:
        assert isinstance(root, LazyParameters)
        root.to_empty(device=settings.device)
        root.initialize_parameters()


def find_units(root: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """The submodules that are sharded as one each, with their names; inner ones first.

    Raises:
        ConfigError: A pattern fits none.
    """
    found = [(name, m) for name, m in root.named_modules() if name and any(matches(name, p) for p in patterns)]
    for pattern in patterns:
        if not any(matches(name, pattern) for name, _ in found):
            raise ConfigError(f"The plan's unit {pattern!r} is not in the model; correct the plan.")
    return sorted(found, key=lambda item: -item[0].count("."))


def _find_kept(root: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Modules with parameters that fit a pattern, by name; inner ones first."""
    found = [
        (name, m)
        for name, m in root.named_modules()
        if name and any(matches(name, p) for p in patterns) and any(True for _ in m.parameters())
    ]
    return dict(sorted(found, key=lambda item: -item[0].count(".")))


def _maker(root: nn.Module, settings: LayoutSettings) -> Callable[[str, nn.Module], None]:
    """Makes the weights of one part at a time; weights that were one object stay one object."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for layer in root.modules():
        for key, parameter in layer.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((layer, key))
    tied = [places for places in owners.values() if len(places) > 1]

    def prepare(name: str, part: nn.Module) -> None:
        materialize(part, name=name, device=settings.device, seed=settings.seed)
        for places in tied:
            now = [layer.get_parameter(key) for layer, key in places]
            made = next((p for p in now if not p.is_meta), None)
            if made is not None:
                for layer, key in places:
                    layer.register_parameter(key, made)

    return prepare
