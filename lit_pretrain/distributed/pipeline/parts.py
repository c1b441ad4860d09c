"""Stages made by pruning: what lives elsewhere is replaced by something without weights, and no name changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lit_pretrain.distributed.pipeline.layout import PipelineLayout, blocks_of
from lit_pretrain.distributed.pipeline.stand_ins import Absent, Departed, Inbox, Received, StageForward
from lit_pretrain.distributed.pipeline.views import own_copy, shallow, view_of
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan


class PipelineParts:
    """This rank's stages of a model.

    The model is pruned in place: it keeps the union of this rank's stages, under the names that the whole model had,
    so its state dict is a part of the whole one. Each stage is a view of it: a copy that shares modules and parameters,
    to be split, sharded and run as one.

    Args:
        model: Whole; may be on the meta device.
        plan: Its parts. A module named in both ``embed`` and ``head`` is tied: both ends keep it.
        layout: Which stage has what.
        rank: This pipeline rank.

    Raises:
        ConfigError: Parameters that the plan leaves out.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, layout: PipelineLayout, *, rank: int) -> None:
        self.model, self.plan, self.layout, self.rank = model, plan, layout, rank
        self.stages = layout.stages_of(rank)
        self._blocks = [f"{plan.blocks}.{name}" if plan.blocks else name for name in blocks_of(model, plan)]
        self._check()
        self._twins: list[tuple[nn.Module, nn.Module]] = []
        self.tied = self._find_tied() if layout.num_stages > 1 else []
        self.inboxes = [Inbox() for _ in self.stages]
        self.views = [self._view(stage, inbox) for stage, inbox in zip(self.stages, self.inboxes, strict=True)]
        self.roots: list[nn.Module] = list(self.views)  # what is sharded and run; may hold a view as a part
        if self.has_first and self.has_last:
            for _, name in self.tied:
                _own_parameter(self.views[-1], name)
        self._prune()

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here."""
        return self.stages[0] == 0

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return self.stages[-1] == self.layout.num_stages - 1

    def _check(self) -> None:
        homes = (*self.plan.embed, *self._blocks, *self.plan.head)
        covered = {id(p) for home in homes for p in self.model.get_submodule(home).parameters()}
        left = [name for name, p in self.model.named_parameters() if id(p) not in covered]
        if left:
            raise ConfigError(
                f"The plan of {type(self.model).__name__} leaves out {', '.join(left[:3])}"
                f"{' and more' if len(left) > 3 else ''}, so no pipeline stage would train it; name its module in the "
                "plan's embed or head."
            )

    def _find_tied(self) -> list[tuple[str, str]]:
        """Names of parameters that embedding and head share, as each of them calls it."""
        first = {id(p): name for name, p in self._named(self.plan.embed)}
        return [(first[id(p)], name) for name, p in self._named(self.plan.head) if id(p) in first]

    def _named(self, modules: tuple[str, ...]) -> Iterator[tuple[str, nn.Parameter]]:
        for module in modules:
            for name, parameter in self.model.get_submodule(module).named_parameters():
                yield f"{module}.{name}", parameter

    def _view(self, stage: int, inbox: Inbox) -> nn.Module:
        is_first, is_last = stage == 0, stage == self.layout.num_stages - 1
        layers = self.layout.layers_of(stage)
        replaced: dict[str, nn.Module] = {}
        if not is_last:
            own = self.plan.embed if is_first else ()
            replaced |= {name: Departed() for name in self.plan.head if name not in own}
        if not is_first:
            for name in self.plan.embed:
                kept = is_last and name in self.plan.head
                entry = Received(inbox)
                replaced[name] = _speaking(self.model.get_submodule(name), entry) if kept else entry
        for index, name in enumerate(self._blocks):
            if index not in layers:
                replaced[name] = Received(inbox) if index < layers.start else Departed()
        view, copies = view_of(self.model, replaced)
        self._twins += [(copy, self.model.get_submodule(path)) for path, copy in copies.items()]
        self._twins += [(module, self.model) for module in replaced.values()]
        view.forward = StageForward(view.forward, inbox, is_last=is_last)
        return view

    def connect(self) -> None:
        """Let the first layer of each stage start from the activations received.

        Once, after everything else that hooks on to modules (sharding), which has to see the true input. A model may
        thus do as it likes around its layers (scale embeddings, drop out, add residuals): each bit of it counts once,
        on the stage of the layer before it. What goes around a layer is refused, when shapes are exchanged.
        """
        for stage, view, inbox in zip(self.stages, self.views, self.inboxes, strict=True):
            layers = self.layout.layers_of(stage)
            if stage > 0:
                name = self._blocks[layers.start] if layers else self.plan.head[0]
                view.get_submodule(name).register_forward_pre_hook(_enter(inbox), prepend=True, with_kwargs=True)

    def follow_mode(self) -> None:
        """Put copies and stand-ins into training or evaluation mode as the model is, which alone is told of it."""
        for twin, original in self._twins:
            twin.training = original.training
        for root in self.roots:
            root.training = self.model.training

    def _prune(self) -> None:
        layers = {index for stage in self.stages for index in self.layout.layers_of(stage)}
        gone = [name for index, name in enumerate(self._blocks) if index not in layers]
        kept = (set(self.plan.embed) if self.has_first else set()) | (set(self.plan.head) if self.has_last else set())
        gone += [name for name in dict.fromkeys((*self.plan.embed, *self.plan.head)) if name not in kept]
        for name in gone:
            parent, _, leaf = name.rpartition(".")
            self.model.get_submodule(parent)._modules[leaf] = Absent()


def _enter(inbox: Inbox) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        received = inbox.entering
        assert received is not None
        if args:
            return (received, *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: received}

    return hook


def _speaking(module: nn.Module, entry: Received) -> nn.Module:
    """A tied embedding on the last stage: its weight is the head's, its forward gives what was received."""
    twin = shallow(module)
    twin.forward = entry.forward
    return twin


def _own_parameter(view: nn.Module, name: str) -> None:
    """Give a view a parameter of its own where it shared one with another view of the same rank."""
    path, _, leaf = name.rpartition(".")
    owner = shallow(view.get_submodule(path))
    owner._parameters = dict(owner._parameters)
    shared = owner._parameters[leaf]
    assert shared is not None
    owner._parameters[leaf] = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    parent, _, module = path.rpartition(".")
    copies: dict[str, nn.Module] = {"": view}
    own_copy(parent, copies)._modules[module] = owner
