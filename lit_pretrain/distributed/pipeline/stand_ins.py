"""What stands in for parts of a model that live on other stages, and how a stage runs with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lit_pretrain.distributed.pipeline.calls import Call


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
