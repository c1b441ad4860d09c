"""Runs the stages of one rank under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lit_pretrain.distributed.pipeline import _compat
from lit_pretrain.distributed.pipeline.calls import Call
from lit_pretrain.distributed.pipeline.parts import PipelineParts
from lit_pretrain.distributed.pipeline.stand_ins import StageForward
from lit_pretrain.distributed.pipeline.ties import Ties
from lit_pretrain.errors import ConfigError

Loss = Callable[[Any, int], Tensor]
"""The model's output for a microbatch, and its number, to the loss to differentiate; called on the last stage."""

_TENSOR = object()  # stands where an output holds a tensor


class Pipeline:
    """One rank's place in a pipeline.

    Every method that runs something is called by every rank of the pipeline, with the same arguments.

    Args:
        parts: This rank's stages, after they were split, sharded or compiled.
        device: Where they compute.
        group: The ranks of the pipeline, in order.
        pair: The first and the last of them, where tied weights live on two ranks; see :func:`make_pair`.
        context: Around each stage's forward and the loss, not around backward: autocast, for one.
    """

    def __init__(
        self,
        parts: PipelineParts,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        pair: dist.ProcessGroup | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if parts.layout.splits_backward:
            _refuse_compiled(parts)
        self.parts, self.layout, self.device, self.group = parts, parts.layout, device, group
        self.ties = Ties(parts, pair)
        parts.connect()
        self._schedules: dict[Hashable, Any] = {}
        self._stages: list[_compat.Stage] = []
        self._loss: Loss | None = None
        self._output: tuple[list[Any], TreeSpec] | None = None
        self.ends_window, self._reduces = True, True
        self._context = context
        for view in parts.views:
            assert isinstance(view.forward, StageForward)
            view.forward.context = context
        if parts.has_last:
            last = parts.views[-1].forward
            assert isinstance(last, StageForward)
            last.forward = self._flattening(last.forward)

    # ---------------------------------------------------------------- running

    def train(self, call: Call, loss: Loss, *, key: Hashable = None) -> None:
        """Forward and backward of one batch; gradients are added to those that are there.

        Args:
            call: The model's arguments for the whole batch.
            loss: Called on the last stage only; its sum over the microbatches is differentiated.
            key: Differs where shapes differ; a schedule is made for each.

        Raises:
            ConfigError: The rows cannot be shared by the microbatches.
        """
        microbatches = self.layout.num_microbatches
        self._run(call.split(microbatches), loss, mode=("train", key, microbatches))

    @torch.no_grad()
    def evaluate(self, call: Call, loss: Loss, *, microbatches: int, key: Hashable = None) -> None:
        """Forward of one batch.

        Args:
            call: The model's arguments for the whole batch.
            loss: Called on the last stage only; what it returns is not used.
            microbatches: Parts to cut the batch into; divides its rows. Any number will do.
            key: Differs where shapes differ.
        """
        self._run(call.split(microbatches), loss, mode=("eval", key, microbatches))

    def _run(self, calls: list[Call], loss: Loss, *, mode: tuple[str, Hashable, int]) -> None:
        for inbox in self.parts.inboxes:
            inbox.calls, inbox.current = calls, 0
        self._loss = loss
        self.parts.follow_mode()
        self.ties.refresh()
        try:
            schedule = self._schedule(mode)
            # Numbers instead of targets: whoever computes the loss has the microbatch at hand.
            target = torch.arange(len(calls)) if self.parts.has_last else None
            run = schedule.step if mode[0] == "train" else schedule.eval
            run(target=target, return_outputs=False)
        finally:
            self._loss = None
            for inbox in self.parts.inboxes:
                inbox.calls = []

    def _schedule(self, mode: tuple[str, Hashable, int]) -> Any:
        """One schedule for each mode and shape: torch's would clear gradients when it switches between them."""
        if mode in self._schedules:
            return self._schedules[mode]
        kinds = _compat.TRAINING if mode[0] == "train" else _compat.EVALUATING
        stages = [
            _compat.Stage(
                root,
                index=index,
                num_stages=self.layout.num_stages,
                inbox=inbox,
                device=self.device,
                group=self.group,
            )
            for root, index, inbox in zip(self.parts.roots, self.parts.stages, self.parts.inboxes, strict=True)
        ]
        for stage in stages:
            stage.reduces = self._reduces
        schedule = _compat.make_schedule(kinds[self.layout.schedule], stages, mode[2], self._compute_loss)
        if mode[0] == "eval":
            _compat.keep_forwards_only(schedule)
        loss, self._loss = self._loss, None
        for inbox in self.parts.inboxes:
            inbox.checking = True
        with self._kept_gradients():
            _compat.exchange_shapes(schedule, train=mode[0] == "train")
        self._loss = loss
        self._agree()
        self._stages += stages
        self._schedules[mode] = schedule
        return schedule

    def _agree(self) -> None:
        """Every rank raises what any rank has found."""
        found: list[str | None] = [None] * self.layout.ranks
        own = next((inbox.problem for inbox in self.parts.inboxes if inbox.problem), None)
        dist.all_gather_object(found, own, group=self.group)
        for inbox in self.parts.inboxes:
            inbox.checking = False
        for problem in found:
            if problem is not None:
                raise ConfigError(problem)

    @contextmanager
    def _kept_gradients(self) -> Iterator[None]:
        parameters = [p for root in self.parts.roots for p in root.parameters()]
        kept = [p.grad for p in parameters]
        yield
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient

    # ---------------------------------------------------------------- the last stage

    def _flattening(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Stages of torch give tensors; a model may give any nest of containers with tensors in it."""

        def flat(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten(forward(*args, **kwargs))
            self._output = ([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
            tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
            return tensors[0] if len(tensors) == 1 else tensors

        return flat

    def _compute_loss(self, output: Any, number: Tensor) -> Tensor:
        tensors = iter((output,) if isinstance(output, Tensor) else output)
        if self._loss is None:  # shapes are being exchanged: anything that depends on the output will do
            return sum((t.sum() for t in tensors if t.is_floating_point()), start=torch.zeros((), device=self.device))
        assert self._output is not None
        leaves, spec = self._output
        nested = tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec)
        with self._context():
            return self._loss(nested, int(number))

    # ---------------------------------------------------------------- gradients

    def begin_batch(self, *, ends_window: bool, reduces: bool) -> None:
        """Say what the next batch is.

        Args:
            ends_window: An update follows it.
            reduces: Its backward ends with sharded modules' gradients being reduced over the data-parallel ranks.
        """
        self.ends_window, self._reduces = ends_window, reduces
        for stage in self._stages:
            stage.reduces = reduces

    def total_norm(self, local_norm: Tensor) -> Tensor:
        """The L2 norm over all stages from that of each. It communicates.

        Args:
            local_norm: Of this rank's gradients without :attr:`Ties.counted_elsewhere`, 0-d.

        Returns:
            0-d, float64: stages may hold other types, or nothing.
        """
        square = local_norm.to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


def make_pair(lines: list[list[int]], *, last: int) -> dist.ProcessGroup | None:
    """Groups of the first and last rank of every pipeline; this rank's, or None. Every rank in the world calls it.

    Args:
        lines: Global ranks of every pipeline, in pipeline order.
        last: Pipeline rank of the last stage.
    """
    own = None
    for line in lines if last != 0 else []:
        group = dist.new_group([line[0], line[last]])
        if dist.get_rank() in (line[0], line[last]):
            own = group
    return own


def _refuse_compiled(parts: PipelineParts) -> None:
    for view in parts.views:
        for name, module in view.named_modules():
            if _compat.is_compiled(module):
                raise ConfigError(
                    f"strategy.schedule={parts.layout.schedule} computes input and weight gradients apart, which "
                    f"torch.compile (of {name or type(view).__name__}) does not allow; use schedule=1f1b, "
                    "interleaved_1f1b, gpipe or looped_bfs, or compile=false."
                )
