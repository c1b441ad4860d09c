"""Numbers of every update, averaged over all ranks and read an update later, so that no rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor


@dataclass
class _Sent:
    update: int
    host: Tensor  # (n,) float64, on the CPU
    arrived: Any = None  # a CUDA event: the copy to the host is done
    work: Any = None  # the reduction
    age: int = 0  # in updates


class LaggingMean:
    """Means over all ranks, equal to the last bit on each of them, so that all decide alike.

    Values go through two stages: they reach the host (at once, or when a CUDA device has computed them), then a gloo
    group of their own reduces them in the background. Each takes an update, so that nobody waits: a CPU run of several
    ranks reads a value one update late, a CUDA run two; one process reads it at once on a CPU, one late on CUDA.

    Making the object is a collective call, and so is every other one.

    Args:
        trainer: After its process group was initialised.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._world_size = trainer.world_size
        self._in_flight: list[_Sent] = []
        self._group: Any = None
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def send(self, update: int, values: Tensor) -> None:
        """Start the way of one update's values, and move those before it on.

        Args:
            update: Told with the means.
            values: (n,), on any device; the same n on every rank.
        """
        for sent in self._in_flight:
            sent.age += 1
            self._reduce(sent)
        sent = _Sent(update, values.detach())
        if values.is_cuda:
            sent.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            sent.host.copy_(values.detach(), non_blocking=True)
            sent.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.arrived.record()
        else:
            self._reduce(sent)
        self._in_flight.append(sent)

    def ready(self) -> list[tuple[int, list[float]]]:
        """Updates and means that have arrived, oldest first; the same on every rank."""
        done = [sent for sent in self._in_flight if sent.age >= self._lag(sent)]
        self._in_flight = [sent for sent in self._in_flight if sent.age < self._lag(sent)]
        return [self._read(sent) for sent in done]

    def flush(self) -> list[tuple[int, list[float]]]:
        """Everything that is on its way; waits. Also the way to forget it: a reduction that was begun has to end."""
        done, self._in_flight = self._in_flight, []
        for sent in done:
            self._reduce(sent)
        return [self._read(sent) for sent in done]

    def _lag(self, sent: _Sent) -> int:
        return int(self._group is not None) + int(sent.arrived is not None)

    def _reduce(self, sent: _Sent) -> None:
        if sent.work is not None:
            return
        if sent.arrived is not None:
            sent.arrived.synchronize()  # of an update that the device has left behind
        sent.host = sent.host.to(torch.float64, copy=True)  # gloo reduces in place
        if self._group is not None:
            sent.work = dist.all_reduce(sent.host, group=self._group, async_op=True)

    def _read(self, sent: _Sent) -> tuple[int, list[float]]:
        if sent.work is not None:
            sent.work.wait()
            return sent.update, (sent.host / self._world_size).tolist()
        if sent.arrived is not None:
            sent.arrived.synchronize()
        return sent.update, sent.host.tolist()
