"""Whole states out of those of the stages, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError


class StageStates:
    """Puts together what one process would save, and takes a stage's share of it.

    Every method is called by every rank of the pipeline.

    Args:
        module: Before it is pruned.
        group: The ranks of the pipeline.
        keeps: Whether this rank speaks for its stage.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup, keeps: bool) -> None:
        self._module, self._group, self._keeps = module, group, keeps
        self._state_names = list(module.state_dict())
        firsts: dict[int, str] = {}
        self._canonical: dict[str, str] = {}  # weights that were one object go by the first of their names
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._canonical[name] = firsts.setdefault(id(parameter), name)
        self._places = {name: place for place, name in enumerate(dict.fromkeys(self._canonical.values()))}

    def _gathered(self, own: Any) -> list[Any] | None:
        """What all ranks of the pipeline have, on the first of them."""
        first = dist.get_rank(self._group) == 0
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if first else None
        dist.gather_object(own, parts, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return parts if self._keeps else None

    def weights(self) -> dict[str, Any]:
        """The whole state dict on the first rank that keeps, nothing elsewhere."""
        parts = self._gathered(state.whole_state_dict(self._module, keep=self._keeps))
        if parts is None:
            return {}
        merged = {name: value for part in reversed(parts) for name, value in part.items()}
        return {name: merged.pop(name) for name in self._state_names if name in merged} | merged

    def own_weights(self) -> dict[str, Any]:
        """The whole state dict, with tensors on the meta device where another stage has the values. No copy is made."""
        own = self._module.state_dict()
        return {name: own[name] if name in own else _elsewhere() for name in dict.fromkeys((*self._state_names, *own))}

    def load_weights(self, whole: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's share of a whole state dict.

        Raises:
            RuntimeError: A name is missing or surplus, as ``load_state_dict`` says it.
        """
        here = set(self._module.state_dict())
        elsewhere = set(self._state_names) - here
        share = {name: value for name, value in whole.items() if name not in elsewhere}
        state.load_whole_state_dict(self._module, share, strict=strict)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state, as one process would number it, on the first rank that keeps."""
        own = state.whole_optimizer_state(optimizer, keep=self._keeps)
        parts = self._gathered((own, self._names(optimizer)))
        if parts is None:
            return {}
        entries: dict[str, Any] = {}
        settings: dict[Any, Any] = {}
        for part, names in reversed(parts):
            for (key, group_names), group in zip(names.items(), part["param_groups"], strict=True):
                settings[key] = group
                for index, name in zip(group["params"], group_names, strict=True):
                    if index in part["state"]:
                        entries[name] = part["state"][index]
        groups: list[Any] = []
        out: dict[int, Any] = {}
        for key, group_names in self._ordered([names for _, names in parts]).items():
            start = sum(len(group["params"]) for group in groups)
            indices = list(range(start, start + len(group_names)))
            groups.append({**settings[key], "params": indices})
            out |= {i: entries[name] for i, name in zip(indices, group_names, strict=True) if name in entries}
        return {**own, "state": out, "param_groups": groups}

    def own_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state as one process would number it, on every rank, tensors as in ``own_weights``."""
        own, names = optimizer.state_dict(), self._names(optimizer)
        here = dict(zip(_flat(names.values()), _indices(own), strict=True))
        outline = {
            name: {key: None if isinstance(v, Tensor) else v for key, v in own["state"][index].items()}
            for name, index in here.items()
            if index in own["state"]
        }
        settings = {
            key: {k: v for k, v in group.items() if k != "params"}
            for key, group in zip(names, own["param_groups"], strict=True)
        }
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, (names, outline, settings), group=self._group)
        merged: dict[str, Any] = {}
        for _, part, _ in reversed(every):
            merged |= part
        groups: list[Any] = []
        entries: dict[int, Any] = {}
        for key, group_names in self._ordered([part for part, _, _ in every]).items():
            start = sum(len(group["params"]) for group in groups)
            indices = list(range(start, start + len(group_names)))
            groups.append({**next(s[key] for _, _, s in every if key in s), "params": indices})
            for index, name in zip(indices, group_names, strict=True):
                if name in here and here[name] in own["state"]:
                    entries[index] = own["state"][here[name]]
                elif name in merged:
                    entries[index] = {k: _elsewhere() if v is None else v for k, v in merged[name].items()}
        return {**own, "state": entries, "param_groups": groups}

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters of each group over all stages, in the order of ``own_optimizer``."""
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, self._names(optimizer), group=self._group)
        return list(self._ordered(every).values())

    def load_optimizer(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load this rank's share of a whole optimizer state.

        Raises:
            ConfigError: The state is of other parameter groups.
        """
        names = self._names(optimizer)
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, names, group=self._group)
        ordered = self._ordered(every)
        saved = dict(zip(ordered, whole["param_groups"], strict=False))
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != [len(group) for group in ordered.values()]:
            raise ConfigError(
                f"The checkpoint's optimizer has groups of {sizes} parameters, this one of "
                f"{[len(group) for group in ordered.values()]}; use the parameter groups it was saved with."
            )
        by_name = {
            name: whole["state"][index]
            for key, group_names in ordered.items()
            for index, name in zip(saved[key]["params"], group_names, strict=True)
            if index in whole["state"]
        }
        entries: dict[int, Any] = {}
        groups = []
        for (key, own_names), own in zip(names.items(), optimizer.state_dict()["param_groups"], strict=True):
            groups.append({**saved[key], "params": own["params"]})
            entries |= {i: by_name[n] for i, n in zip(own["params"], own_names, strict=True) if n in by_name}
        state.load_whole_optimizer_state(optimizer, {**whole, "state": entries, "param_groups": groups})

    def _names(self, optimizer: Optimizer) -> dict[Any, list[str]]:
        """Names of the parameters of each group on this rank; a group goes by its ``name``, else by its place."""
        names = {id(p): self._canonical[n] for n, p in self._module.named_parameters()}
        return {
            group.get("name", place): [names[id(p)] for p in group["params"]]
            for place, group in enumerate(optimizer.param_groups)
        }

    def _ordered(self, ranks: list[dict[Any, list[str]]]) -> dict[Any, list[str]]:
        """Names in each group over all ranks, in the order of the whole module: that of one process.

        A stage may lack a group that would be empty there, if groups have names.
        """
        longest = max(range(len(ranks)), key=lambda rank: len(ranks[rank]))
        keys = list(ranks[longest])
        keys += [key for groups in ranks for key in groups if key not in keys]
        return {
            key: sorted({n for groups in ranks for n in groups.get(key, [])}, key=self._places.__getitem__)
            for key in dict.fromkeys(keys)
        }


def _elsewhere() -> Tensor:
    return torch.empty(0, device="meta")


def _flat(groups: Iterable[list[str]]) -> list[str]:
    return [name for group in groups for name in group]


def _indices(state: Mapping[str, Any]) -> list[int]:
    return [index for group in state["param_groups"] for index in group["params"]]
