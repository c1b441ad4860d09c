"""Copies of modules that share what they hold."""

from __future__ import annotations

import copy

from torch import nn


def view_of(model: nn.Module, replaced: dict[str, nn.Module]) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of a model that shares all but some submodules and what contains them; and those containers by name.

    Args:
        model: Stays as it is.
        replaced: Full name to the module that the copy has there.
    """
    copies = {"": shallow(model)}
    for name, module in replaced.items():
        parent, _, leaf = name.rpartition(".")
        own_copy(parent, copies)._modules[leaf] = module
    return copies[""], copies


def own_copy(name: str, copies: dict[str, nn.Module]) -> nn.Module:
    """The copy of a container, made with those around it where there is none yet.

    Args:
        name: Of the container.
        copies: Those made so far, by name; the root's is ``""``.
    """
    if name not in copies:
        parent, _, leaf = name.rpartition(".")
        above = own_copy(parent, copies)
        copies[name] = shallow(above.get_submodule(leaf))
        above._modules[leaf] = copies[name]
    return copies[name]


def shallow(module: nn.Module) -> nn.Module:
    """A copy that shares submodules, parameters and buffers, also when they are later replaced by sharded ones.

    Hooks and the list of submodules are its own.
    """
    twin = copy.copy(module)
    for key, value in twin.__dict__.items():
        if isinstance(value, dict) and key not in ("_parameters", "_buffers"):
            twin.__dict__[key] = copy.copy(value)
    return twin
