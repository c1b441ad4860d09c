"""16-bit copies of a module's weights, in the place of the weights while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Narrow(torch.autograd.Function):
    """The copy, with the way back: its gradients arrive at the master weight, widened before they are added up."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        ctx.wide = master.dtype
        # Not a view of the copy: autograd would lose this node when the copy is refreshed in place.
        return copy.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.wide), None


class _Slot(NamedTuple):
    module: nn.Module
    name: str
    master: nn.Parameter


class _Copy:
    """One weight's copy.

    Args:
        master: The weight.
        dtype: Of the copy.
    """

    def __init__(self, master: nn.Parameter, dtype: torch.dtype) -> None:
        # A first step under inference mode must not leave tensors that training cannot use.
        with torch.inference_mode(False), torch.no_grad():
            self.values = master.detach().to(dtype, copy=True)
        self.master, self.device, self.shape = master, master.device, master.shape
        self.mark = _mark(master)
        self._with_graph: Tensor | None = None

    def fits(self, master: nn.Parameter) -> bool:
        return self.master is master and self.device == master.device and self.shape == master.shape

    def tensor(self) -> Tensor:
        if not (self.master.requires_grad and torch.is_grad_enabled()):
            return self.values
        if self._with_graph is None:  # made once: nothing of it is used up by a backward pass
            self._with_graph = _Narrow.apply(self.master, self.values)  # type: ignore[no-untyped-call]
        return self._with_graph

    def drop_graph(self) -> None:
        if not self.master.requires_grad:
            self._with_graph = None


class WorkingCopies:
    """Weights stay what they are, in float32: the masters that optimizers, callbacks and checkpoints see.

    While the module computes, each is replaced by a 16-bit copy that stays from update to update and is refreshed
    when the master has changed. Gradients of the copies are widened and accumulated in the masters' ``grad``, so
    data parallelism reduces float32 and hooks on the masters fire as ever. A tied weight has one copy.

    Args:
        root: The module.
        dtype: Of the copies.
        kept: Parameters that are not replaced.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, *, kept: frozenset[nn.Parameter] = frozenset()) -> None:
        self._root, self._dtype, self._kept = root, dtype, kept
        self._copies: dict[int, _Copy] = {}
        self._inserted: list[_Slot] = []
        self._stale = False

    @property
    def num_bytes(self) -> int:
        """Of the copies that exist."""
        return sum(copy.values.nbytes for copy in self._copies.values())

    def expire(self) -> None:
        """The masters may have changed: copy all of them before the next pass."""
        self._stale = True

    @contextmanager
    def inserted(self) -> Iterator[None]:
        """The module computes with the copies. May be nested."""
        if self._inserted:
            if self._stale:
                self._refresh()
            yield
            return
        self._insert()
        try:
            yield
        finally:
            self._take_out()

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """The module shows its masters, also within :meth:`inserted`."""
        was_inserted = bool(self._inserted)
        self._take_out()
        try:
            yield
        finally:
            if was_inserted:
                self._insert()

    def _insert(self) -> None:
        slots = [
            _Slot(module, name, parameter)
            for module in self._root.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, nn.Parameter) and parameter.is_floating_point() and parameter not in self._kept
        ]
        before = self._copies
        self._copies = {}
        for slot in slots:
            key = id(slot.master)
            if key not in self._copies:
                found = before.get(key)
                self._copies[key] = found if found and found.fits(slot.master) else _Copy(slot.master, self._dtype)
        self._refresh()
        for slot in slots:
            # As torch.func.functional_call does it: the slot of a parameter takes any tensor.
            slot.module._parameters[slot.name] = self._copies[id(slot.master)].tensor()  # type: ignore[assignment]
        self._inserted = slots

    def _take_out(self) -> None:
        for slot in self._inserted:
            slot.module._parameters[slot.name] = slot.master
        self._inserted = []

    def _refresh(self) -> None:
        """Copy what has changed: all after an update, else what the weights' version counters tell."""
        changed = [c for c in self._copies.values() if self._stale or c.mark != _mark(c.master)]
        with torch.inference_mode(False), torch.no_grad():
            if changed:
                torch._foreach_copy_([c.values for c in changed], [c.master.detach() for c in changed])
        for copy in changed:
            copy.mark = _mark(copy.master)
        for copy in self._copies.values():
            copy.drop_graph()
        self._stale = False


def _mark(master: nn.Parameter) -> tuple[int, int]:
    # `Tensor._version` is documented in torch's notes on autograd; `data = ...` changes the address instead.
    return master._version, master.data_ptr()
