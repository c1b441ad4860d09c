"""What of a stage is sharded and run as one: its view of the model, under the name that the whole module gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lit_pretrain.distributed.pipeline.stand_ins import Absent
from lit_pretrain.distributed.sharding import reshard, sharded_modules
from lit_pretrain.distributed.tensor_parallel import matches
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import LazyParameters, ParallelPlan


class Root(nn.Module):
    """A view as the only part of a module, so that its parameters have the names that the whole module gives them.

    Args:
        view: Of the model.
        name: Of the model in the module.
    """

    def __init__(self, view: nn.Module, *, name: str) -> None:
        super().__init__()
        self.add_module(name, view)
        self._name = name

    def forward(self, *received: Any) -> Any:
        """The stage's."""
        return self._modules[self._name](*received)  # type: ignore[misc]


class LazyRoot(Root):
    """A root whose parameters, without memory yet, get their values from the module.

    Args:
        view: Of the model.
        name: Of the model in the module.
        module: Gives every parameter that has memory its initial value.
    """

    def __init__(self, view: nn.Module, *, name: str, module: LazyParameters) -> None:
        super().__init__(view, name=name)
        self.__dict__["_module"] = module  # not a part

    def initialize_parameters(self) -> None:
        """Give the parameters of this stage, and of the others here, their initial values."""
        self.__dict__["_module"].initialize_parameters()


def root_of(view: nn.Module, *, name: str, lazy: LazyParameters | None) -> Root:
    """The root around a view."""
    return Root(view, name=name) if lazy is None else LazyRoot(view, name=name, module=lazy)


def pipelined_name(module: nn.Module, plan: ParallelPlan) -> str:
    """The attribute of a module that holds the model of a plan.

    Raises:
        ConfigError: The plan has no blocks, or names parts of several attributes; or parameters are outside of it.
    """
    kind = type(module).__name__
    if not plan.blocks:
        raise ConfigError(
            f"There is no plan of how {kind} is cut into pipeline stages; give the strategy a "
            "lit_pretrain.specs.ParallelPlan with embed, blocks and head, such as blocks='model.layers'."
        )
    names = {name.split(".")[0] for name in (plan.blocks, *plan.embed, *plan.head)}
    if len(names) > 1 or not hasattr(module, plan.blocks.split(".")[0]):
        raise ConfigError(
            f"The plan's embed, blocks and head must lie in one attribute of {kind}, which a step calls once, not in "
            f"{', '.join(sorted(names))}; put them into one nn.Module."
        )
    (name,) = names
    outside = [n for n, _ in module.named_parameters() if n.split(".")[0] != name]
    if outside:
        raise ConfigError(
            f"{kind}.{outside[0]} is a parameter outside of {kind}.{name}, which runs as a pipeline; move it into "
            f"{name}, and name it in the plan's embed or head."
        )
    return name


def within_model(plan: ParallelPlan, name: str) -> ParallelPlan:
    """A module's plan with names as its model has them."""

    def inner(word: str) -> str:
        return word[len(name) + 1 :]

    assert plan.blocks is not None
    return dataclasses.replace(
        plan,
        embed=tuple(map(inner, plan.embed)),
        blocks=inner(plan.blocks),
        head=tuple(map(inner, plan.head)),
    )


def plan_of_view(plan: ParallelPlan, root: nn.Module, *, is_first: bool) -> ParallelPlan:
    """What of a plan a stage has, patterns written out: parts that live elsewhere can be neither split nor sharded.

    Args:
        plan: Of the whole module.
        root: Of the stage.
        is_first: Whether the embedding is there.
    """
    modules = dict(root.named_modules())
    here = [name for name, module in modules.items() if not isinstance(module, Absent)]

    def present(patterns: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for pattern in patterns for name in here if matches(name, pattern))

    styles = {n: style for pattern, style in plan.tensor_parallel.items() for n in present([pattern])}
    for pattern, style in plan.tensor_parallel.items() if not is_first else ():
        for name in (n for n in modules if style == "vocabulary" and matches(n, pattern)):
            styles[name] = "ids" if isinstance(modules[name], Absent) else "tied_head"
    return dataclasses.replace(
        plan,
        tensor_parallel=styles,
        sharded_dropout=present(plan.sharded_dropout),
        units=present(plan.units),
    )


class Gathering:
    """Gathers all parameters of this rank's stages at once, for evaluation.

    One gather per unit and step, whatever the number of microbatches: ranks of other pipelines take part, and may have
    another number of rows.

    Args:
        roots: Sharded.
        reshards: Units are freed after each forward pass (stage 3).

    Attributes:
        modules: The roots.
    """

    def __init__(self, roots: Sequence[nn.Module], *, reshards: bool) -> None:
        self.modules = nn.ModuleList(roots)
        self._units = [m for m in sharded_modules(self.modules) if not isinstance(m, Root)] if reshards else []

    @contextmanager
    def all(self) -> Iterator[None]:
        """Everything is gathered inside, and freed after it."""
        for module in sharded_modules(self.modules):
            module.unshard()
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in self._units:
                unit.set_reshard_after_forward(True, recurse=False)
            reshard(self.modules)
