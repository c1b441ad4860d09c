"""16-bit copies of a module's weights, in the place of the weights while it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_pretrain.errors import ConfigError


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
        self.mark, self._version = _mark(master), self.values._version
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

    def refreshed(self) -> None:
        """It holds what the master holds."""
        self.mark, self._version = _mark(self.master), self.values._version

    @property
    def was_written(self) -> bool:
        """Whether somebody else has changed it since; the tensor with the graph counts its own changes, from 0."""
        graph = self._with_graph
        return self.values._version != self._version or (graph is not None and graph._version != 0)


class _ShowMasters:
    """A hook of ``state_dict``: what is saved within a step are the masters too.

    Args:
        copies: Whose; None for what came out of a pickle, which shows what is there.
    """

    def __init__(self, copies: WorkingCopies | None = None) -> None:
        self._copies = None if copies is None else weakref.ref(copies)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        copies = self._copies() if self._copies is not None else None
        for slot in copies.slots_of(module) if copies is not None else ():
            given = state.get(prefix + slot.name)
            if given is not None:
                state[prefix + slot.name] = slot.master if given.requires_grad else slot.master.detach()

    def __deepcopy__(self, memo: Any) -> _ShowMasters:
        return self  # the copy of a module has no slots here

    def __reduce__(self) -> Any:
        return _ShowMasters, ()


class WorkingCopies:
    """Weights stay what they are, in float32: the masters that optimizers, callbacks and checkpoints see.

    While the module computes, each is replaced by a 16-bit copy that stays from update to update and is refreshed
    when the master has changed. Gradients of the copies are widened and accumulated in the masters' ``grad``, so
    data parallelism reduces float32 and hooks on the masters fire as ever. A tied weight has one copy. ``state_dict``
    gives the masters, whenever it is called; what writes a copy is refused, for the next refresh would undo it.

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
        self._hooks: dict[nn.Module, RemovableHandle] = {}

    def close(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def slots_of(self, module: nn.Module) -> list[_Slot]:
        """Where copies stand in for a module's own weights now."""
        return [slot for slot in self._inserted if slot.module is module]

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
            self._check_untouched()
        finally:
            self._take_out()

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """The module shows its masters, also within :meth:`inserted`."""
        was_inserted = bool(self._inserted)
        self._check_untouched()
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
            if slot.module not in self._hooks:
                self._hooks[slot.module] = slot.module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    _ShowMasters(self)
                )
        self._inserted = slots

    def _check_untouched(self) -> None:
        for slot in self._inserted:
            if self._copies[id(slot.master)].was_written:
                name = next(name for name, p in self._named_masters() if p is slot.master)
                raise ConfigError(
                    f"{name} was changed in place within a step, where it is a 16-bit copy that the next update "
                    "overwrites; change it between steps (on_train_batch_end), or name its part in precision.keep_fp32."
                )

    def _named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        names = {module: name for name, module in self._root.named_modules()}
        for slot in self._inserted:
            yield f"{names[slot.module]}.{slot.name}".lstrip("."), slot.master

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
            copy.refreshed()
        for copy in self._copies.values():
            copy.drop_graph()
        self._stale = False


def _mark(master: nn.Parameter) -> tuple[int, int]:
    # `Tensor._version` is documented in torch's notes on autograd; `data = ...` changes the address instead.
    return master._version, master.data_ptr()
