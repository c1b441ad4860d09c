"""Decisions that every rank takes at the same update, without waiting for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


class Agreement:
    """Questions with a whole number for an answer; the largest answer of all ranks counts.

    At the end of update ``u`` every rank starts one asynchronous reduce over all questions, and reads it at the end of
    update ``u + 1``, when it has long arrived: no rank waits. All ranks therefore learn an answer at the same update,
    one late. One process alone learns it at once.

    The reduce has a gloo group of its own: it may not get between the collectives of training or of a checkpoint.
    Making the object is a collective call, and so is every other one.

    Args:
        trainer: After its process group was initialised.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._questions: dict[str, Callable[[], int]] = {}
        self._answers: dict[str, int] = {}
        self._asked_at = -1
        self._sent: torch.Tensor | None = None
        self._work: Any = None
        self._group: Any = None
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    @staticmethod
    def of(trainer: Trainer) -> Agreement:
        """The one that another callback of this trainer has made, else a new one: there is one reduce per update."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            shared = getattr(callback, "agreement", None)
            if isinstance(shared, Agreement):
                return shared
        return Agreement(trainer)

    @property
    def group(self) -> Any:
        """The gloo group; None for one process."""
        return self._group

    def ask(self, name: str, answer: Callable[[], int]) -> None:
        """Add a question. Every rank adds the same ones, before the first update."""
        self._questions[name] = answer

    def at_update(self, name: str, *, step: int) -> int:
        """The newest answer that all ranks know. The first call for a ``step`` sends this rank's own answers."""
        if step != self._asked_at:
            self._asked_at = step
            self._receive()
            self._send()
            if self._group is None:
                self._receive()
        return self._answers.get(name, 0)

    def now(self, name: str) -> int:
        """The answer of this moment. Waits for all ranks."""
        self._receive()
        self._send()
        self._receive()
        return self._answers.get(name, 0)

    def close(self) -> None:
        """Wait for what is on its way. The object can be used again."""
        self._receive()
        self._asked_at = -1

    def _send(self) -> None:
        self._sent = torch.tensor([answer() for answer in self._questions.values()], dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _receive(self) -> None:
        if self._sent is None:
            return
        if self._work is not None:
            self._work.wait()
        self._answers = dict(zip(self._questions, self._sent.tolist(), strict=True))
        self._sent = self._work = None
