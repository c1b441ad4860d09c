"""A copy of everything that decides the next update on this rank, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_pretrain.callbacks import _random
from lit_pretrain.callbacks._compat import averages
from lit_pretrain.distributed import sharding, state

_ALIGNMENT = 64  # bytes; of a cache line, and enough for every type
Key = tuple[Any, ...]


def live_tensors(trainer: Trainer) -> Iterator[tuple[Key, Tensor]]:
    """Parameters, buffers (also those that are not saved), masters, optimizer states and Lightning's averages of
    weights, of this rank and each once.

    A sharded tensor is given as the plain part that this rank holds: a view, which writes to the tensor.
    """  # noqa: D205
    module, seen = trainer.lightning_module, set()

    def found() -> Iterator[tuple[Key, Tensor]]:
        for name, buffer in module.named_buffers():
            yield ("buffer", name), buffer
        for name, parameter in module.named_parameters():
            yield ("parameter", name), parameter
        for key, value in _optimizer_entries(trainer):
            if isinstance(value, Tensor):
                yield key, value
        yield from averages.tensors(trainer)

    for key, tensor in found():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield key, state.local(tensor.detach())


def _optimizer_entries(trainer: Trainer) -> Iterator[tuple[Key, Any]]:
    for i, optimizer in enumerate(trainer.optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                yield ("master", i, g, j), parameter
                for name, value in optimizer.state.get(parameter, {}).items():
                    yield ("state", i, g, j, name), value


class Memory:
    """One block of bytes that snapshots are laid into; it grows when it has to and is never touched anew otherwise.

    Args:
        path: A file to hold it, on a local disk; None holds it in memory, page-locked when tensors are on CUDA.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._block = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._block.numel()

    def lay_out(self, tensors: list[Tensor]) -> list[Tensor]:
        """A tensor on the host for each of ``tensors``, of its shape and type."""
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if end > self.size:
            self._block = self._allocate(end, pinned=any(tensor.is_cuda for tensor in tensors))
        out = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            part = self._block[offset : offset + tensor.numel() * tensor.element_size()]
            out.append(part.view(tensor.dtype).view(tensor.shape))
        return out

    def _allocate(self, size: int, *, pinned: bool) -> Tensor:
        if self._path is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)

    def free(self) -> None:
        """Give it back."""
        self._block = torch.empty(0, dtype=torch.uint8)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Copier:
    """Copies to the host while the next forward pass runs: until the optimizer runs, no weight changes.

    On CUDA a stream of its own, else a thread.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[None] | None = None
        self._stream: Any = None
        self._copied: Any = None

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy the first of each pair into the second."""
        if any(source.is_cuda for source, _ in pairs):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _copy(pairs)
                self._copied = self._stream.record_event()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="lit-pretrain-snapshot")
        self._future = self._pool.submit(_copy, pairs)

    def wait(self) -> None:
        """Let what comes next on the device, or the caller, wait until everything is copied."""
        future, self._future = self._future, None
        if future is not None:
            future.result()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Return when everything is copied."""
        self.wait()
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        """End the thread."""
        self.finish()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


@dataclass
class Snapshot:
    """One state of this rank, between two updates.

    Args:
        memory: For the tensors.
    """

    memory: Memory
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    plain: dict[Key, Any] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    random: _random.State = field(default_factory=dict)

    @torch.no_grad()
    def capture(self, trainer: Trainer, copier: Copier) -> None:
        """Take the state of this moment; weights and optimizer states follow in the background.

        Until ``copier.wait`` returns they may be read but not changed. What a forward pass may change is copied at
        once: buffers, and parameters that are not trained (slow copies of others).
        """
        copier.finish()
        sharding.reshard(trainer.lightning_module)  # the weights that the optimizer knows, not gathered ones
        live = list(live_tensors(trainer))
        targets = self.memory.lay_out([tensor for _, tensor in live])
        self.tensors = {key: target for (key, _), target in zip(live, targets, strict=True)}
        untrained = {("parameter", n) for n, p in trainer.lightning_module.named_parameters() if not p.requires_grad}
        pairs = [(key, tensor, target) for (key, tensor), target in zip(live, targets, strict=True)]
        at_once = {key for key, _ in live if key[0] == "buffer" or key in untrained}
        _copy([(tensor, target) for key, tensor, target in pairs if key in at_once])
        copier.copy([(tensor, target) for key, tensor, target in pairs if key not in at_once])
        self.plain = {
            key: deepcopy(value)
            for key, value in _optimizer_entries(trainer)
            if key[0] == "state" and not isinstance(value, Tensor)
        }
        self.groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self.schedulers = [deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
        self.precision = deepcopy(trainer.precision_plugin.state_dict())
        self.random = _random.capture()

    @torch.no_grad()
    def restore(self, trainer: Trainer, copier: Copier) -> None:
        """Put everything back, in place: optimizers, buckets and shards keep their tensors."""
        copier.finish()
        sharding.reshard(trainer.lightning_module)
        self._restore_optimizers(trainer)
        live = dict(live_tensors(trainer))
        _copy([(saved, live[key]) for key, saved in self.tensors.items()])
        for config, saved in zip(trainer.lr_scheduler_configs, self.schedulers, strict=True):
            config.scheduler.load_state_dict(deepcopy(saved))
        if self.precision:
            trainer.precision_plugin.load_state_dict(deepcopy(self.precision))
        _random.restore(self.random)

    def _restore_optimizers(self, trainer: Trainer) -> None:
        """Settings of groups; states that were born later go, those that went come back."""
        names: dict[Key, set[str]] = {}
        for key in (*self.plain, *self.tensors):
            if key[0] == "state":
                names.setdefault(key[:-1], set()).add(key[-1])
        for i, optimizer in enumerate(trainer.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                settings = self.groups[i][g] if g < len(self.groups[i]) else {}  # else of a group that came later
                for name, value in settings.items():
                    if isinstance(group.get(name), Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = deepcopy(value)
                for j, parameter in enumerate(group["params"]):
                    prefix = ("state", i, g, j)
                    if prefix not in names:
                        optimizer.state.pop(parameter, None)
                        continue
                    entries = optimizer.state[parameter]
                    for name in [name for name in entries if name not in names[prefix]]:
                        del entries[name]
                    for name in names[prefix]:
                        if (*prefix, name) in self.plain:
                            entries[name] = deepcopy(self.plain[*prefix, name])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        for name, value in group.items()
        if name != "params"
    }


class Ring:
    """Snapshots, oldest first, in so many blocks of memory.

    Args:
        keep: At most so many.
        path: A folder on a local disk for them; None holds them in memory.
    """

    def __init__(self, *, keep: int, path: Path | None = None) -> None:
        self._free = [Memory(None if path is None else path / f"snapshot-{i}.bin") for i in range(keep)]
        self.copier = Copier()
        self.taken: list[Any] = []

    def take(self, trainer: Trainer, make: Callable[[Snapshot], Any]) -> None:
        """Take one more, in place of the oldest when there is no room; ``make`` wraps it."""
        self.copier.finish()
        if not self._free:
            self._free.append(self.taken.pop(0).snapshot.memory)
        snapshot = Snapshot(self._free.pop())
        snapshot.capture(trainer, self.copier)
        self.taken.append(make(snapshot))

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget some of them."""
        self.copier.finish()
        self._free += [entry.snapshot.memory for entry in self.taken if unwanted(entry)]
        self.taken = [entry for entry in self.taken if not unwanted(entry)]

    @property
    def size(self) -> int:
        """Bytes in use on this rank."""
        blocks: list[Memory] = [*self._free, *(entry.snapshot.memory for entry in self.taken)]
        return sum(block.size for block in blocks)

    def close(self) -> None:
        """Give the memory back and end the thread."""
        self.copier.close()
        self.drop(lambda entry: True)
        for memory in self._free:
            memory.free()
