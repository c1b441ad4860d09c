"""Weights that the first and the last stage share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lit_pretrain.distributed.pipeline._compat import local
from lit_pretrain.distributed.pipeline.parts import PipelineParts


class Ties:
    """Keeps tied weights one.

    On two ranks each end trains its own copy: they start alike, their gradients are summed once per update, so they
    stay alike. On one rank (a V) the last stage's copy is a shadow that no optimizer sees, refreshed before each batch.

    Args:
        parts: This rank's stages.
        pair: The group of first and last rank; None where they are one.
    """

    def __init__(self, parts: PipelineParts, pair: dist.ProcessGroup | None) -> None:
        self.parts, self.pair = parts, pair
        self._one_rank = parts.has_first and parts.has_last
        assert self._one_rank or not parts.tied or pair is not None or not (parts.has_first or parts.has_last)

    @property
    def first(self) -> list[nn.Parameter]:
        """The embedding's tied weights; none where the first stage is elsewhere."""
        view = self.parts.views[0]
        return [view.get_parameter(name) for name, _ in self.parts.tied] if self.parts.has_first else []

    @property
    def last(self) -> list[nn.Parameter]:
        """The head's."""
        view = self.parts.views[-1]
        return [view.get_parameter(name) for _, name in self.parts.tied] if self.parts.has_last else []

    @property
    def counted_elsewhere(self) -> set[int]:
        """``id`` of each parameter of this rank that the first stage counts in a norm over all."""
        return set() if self._one_rank else {id(p) for p in self.last}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weight to its shadow on the same rank; nothing is communicated."""
        if self._one_rank:
            for weight, shadow in zip(self.first, self.last, strict=True):
                local(shadow).copy_(local(weight))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both ends the sum of their gradients. Once per update, by every rank; the two ends communicate."""
        if self._one_rank:
            for weight, shadow in zip(self.first, self.last, strict=True):
                if shadow.grad is not None:
                    _gradient(weight).add_(local(shadow.grad))
                    shadow.grad = None
        elif self.pair is not None:
            for weight in self.first or self.last:
                if weight.requires_grad:
                    dist.all_reduce(_gradient(weight), group=self.pair)

    @torch.no_grad()
    def differ(self) -> bool:
        """Whether the two copies hold other values. First and last rank call it; they communicate."""
        if self._one_rank or self.pair is None:
            return False
        unequal = False
        for weight in self.first or self.last:
            bounds = torch.stack([local(weight), -local(weight)])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.pair)
            unequal |= not torch.equal(bounds[0], -bounds[1])
        return unequal


def _gradient(parameter: Any) -> Tensor:
    """This rank's part of a gradient; zeros where there was none, for the other end has one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
