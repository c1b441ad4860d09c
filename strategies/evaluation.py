"""Ranks with fewer batches than others keep the collectives of the others company."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_pretrain.distributed.collectives import greatest
from lit_pretrain.distributed.sharding import reshard, sharded_modules


class EvaluationTurns:
    """Lets ranks evaluate different numbers of batches.

    Every step gathers parameters, and all ranks of the sharding group have to take part. A rank that has run out of
    batches takes part in the gathers of the steps it does not have, in the order in which the units ran before; the
    user's code does not run there, so nothing is counted twice. The user's step must gather the same units each time.

    Args:
        root: The sharded module.
        keeps_gathered: Units stay gathered until the step ends (stages 1 and 2).
        group: Ranks over which parameters are sharded.
        device: Where the group's backend communicates.
    """

    def __init__(
        self, root: nn.Module, *, keeps_gathered: bool, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._root, self._keeps_gathered, self._group, self._device = root, keeps_gathered, group, device
        self._order = sharded_modules(root)
        self._seen: list[FSDPModule] | None = None
        self._agreed: list[int] | None = None  # batches per loader, the most that any rank has
        self._taken, self._loader, self._is_open = 0, 0, False
        for module in self._order:
            module.register_forward_pre_hook(self._note)  # type: ignore[attr-defined]

    def _note(self, module: Any, _args: Any) -> None:
        if self._seen is not None:
            self._seen.append(module)

    def begin(self, batches: Sequence[int | float]) -> None:
        """An evaluation begins. Every rank calls it.

        Args:
            batches: This rank's number per loader; infinite where it is unknown, and then every step asks the others.
        """
        unknown = greatest(int(any(map(math.isinf, batches))), group=self._group, device=self._device)
        self._agreed = None if unknown else [greatest(int(n), group=self._group, device=self._device) for n in batches]
        self._taken, self._loader, self._is_open = 0, 0, True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the user's."""
        if self._is_open and self._agreed is None:
            greatest(1, group=self._group, device=self._device)
        self._seen = [self._order[0]]
        try:
            yield
            self._order = self._order if len(self._seen) == 1 else self._seen
            self._taken += 1
        finally:
            self._seen = None

    def finish_loader(self) -> None:
        """This rank has no more batches of a loader: stay until no rank has. Every rank calls it."""
        if not self._is_open:
            return
        if self._agreed is not None:
            for _ in range(self._agreed[self._loader] - self._taken):
                self._gather()
            self._loader, self._taken = self._loader + 1, 0
            self._is_open = self._loader < len(self._agreed)
            return
        while greatest(0, group=self._group, device=self._device):
            self._gather()

    def end(self) -> None:
        """The evaluation is over."""
        self._is_open = False

    def _gather(self) -> None:
        for module in self._order:
            module.unshard()
            if not self._keeps_gathered and module is not self._order[0]:
                module.reshard()
        reshard(self._root)
