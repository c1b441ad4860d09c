"""Stages made by pruning: what lives elsewhere is replaced by something without weights, and no name changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lit_pretrain.distributed.pipeline.calls import Call
from lit_pretrain.distributed.pipeline.layout import PipelineLayout, blocks_of
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan


class Leave(BaseException):
    """Carries the activations out of a stage whose next layer lives elsewhere.

    Not an Exception: a model's own ``except Exception`` must not swallow it.
    """

    def __init__(self, activations: Tensor) -> None:
        super().__init__()
        self.activations = activations


class Inbox:
    """What a stage is working on.

    Args:
        calls: The model's arguments for each microbatch, equal on every rank of the pipeline.
        current: The microbatch.
        entering: Activations from the stage before, for the first layer here.
        placeholder: What absent parts before that layer give: the same, except while ``checking``.
        checking: Tell apart what enters the first layer and what goes around it.
        problem: What a check found.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.current = 0
        self.entering: Tensor | None = None
        self.placeholder: Tensor | None = None
        self.checking = False
        self.problem: str | None = None

    def received(self) -> Tensor:
        """For absent parts."""
        assert self.placeholder is not None, "a stage ran outside its schedule"
        return self.placeholder


class Absent(nn.Module):
    """Stands in for a part that lives on another stage. It has no weights."""


class Received(Absent):
    """A part of an earlier stage: gives the activations from the stage before, whatever it is called with.

    What the model makes of them on the way to its first layer here is dropped, see :meth:`PipelineParts.connect`.

    Args:
        inbox: Of the stage.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self.inbox = inbox

    @property
    def weight(self) -> Tensor:
        """Models ask their embedding's weight for type and device; the activations have the same."""
        return self.inbox.received()

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """The activations."""
        return self.inbox.received()


class Departed(Absent):
    """A part of a later stage: reaching it ends this stage's forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Never returns."""
        raise Leave(args[0] if args else next(iter(kwargs.values())))


class StageForward:
    """Runs the model's own forward on a stage: from the first layer it has to the first it has not.

    Args:
        forward: The model's, bound to the stage.
        inbox: Of the stage.
        is_last: Whether the output is the model's.
    """

    def __init__(self, forward: Callable[..., Any], inbox: Inbox, *, is_last: bool) -> None:
        self.forward = forward
        self.inbox = inbox
        self.is_last = is_last
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, *received: Tensor) -> Any:
        """Called by the schedule with the activations from the stage before, or with nothing on the first."""
        inbox = self.inbox
        if not received:
            return self._run()
        inbox.entering = inbox.placeholder = received[0]
        try:
            return self._checked() if inbox.checking else self._run()
        finally:
            inbox.entering = inbox.placeholder = None

    def _run(self) -> Any:
        call = self.inbox.calls[self.inbox.current]
        try:
            with self.context():
                return self.forward(*call.args, **call.kwargs)
        except Leave as leave:
            return leave.activations

    def _checked(self) -> Any:
        inbox = self.inbox
        assert inbox.entering is not None
        inbox.placeholder = inbox.entering.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = self._run()
        if depends(output, inbox.placeholder):
            inbox.problem = (
                "The pipelined model carries values around its layers (such as x + layer(x) outside of them), which "
                "would be lost between stages; move that into the layers that the plan's blocks name."
            )
        return output


def depends(output: Any, leaf: Tensor) -> bool:
    """Whether a gradient would flow from any tensor of an output to a leaf. Computes none."""
    target = torch.autograd.graph.get_gradient_edge(leaf).node
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    if any(t is leaf for t in tree_leaves(output)):
        return True
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is target:
            return True
        fresh = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= fresh
        waiting += fresh
    return False


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


def view_of(model: nn.Module, replaced: dict[str, nn.Module]) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of a model that shares all but some submodules and what contains them; and those containers by name.

    Args:
        model: Stays as it is.
        replaced: Full name to the module that the copy has there.
    """
    copies = {"": shallow(model)}
    for name, module in replaced.items():
        parent, _, leaf = name.rpartition(".")
        _copied(parent, copies)._modules[leaf] = module
    return copies[""], copies


def _copied(name: str, copies: dict[str, nn.Module]) -> nn.Module:
    if name not in copies:
        parent, _, leaf = name.rpartition(".")
        above = _copied(parent, copies)
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
    _copied(parent, copies)._modules[module] = owner
