"""In which order callbacks have to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint


class Order(IntEnum):
    """Places in a callback list, first to last. A callback states its own in the class attribute ``order``."""

    RESUME = 0
    LEARNING_RATE = 10
    NON_FINITE = 20
    ROLLBACK = 30
    PREEMPTION = 40
    STATISTICS = 50
    USER = 60
    SAVE_MARK = 70
    CHECKPOINT = 80


def place(callback: Callback) -> int:
    """Where a callback belongs; one that says nothing is the user's."""
    if isinstance(callback, Checkpoint):
        return Order.CHECKPOINT
    return int(getattr(callback, "order", Order.USER))


def sort_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """A new list: the learning rate is written before anything reads it, gradients are guarded before anything uses
    them, the user's callbacks see both, and checkpoints are saved last. Equals keep the order they came in.
    """  # noqa: D205
    return sorted(callbacks, key=place)


def move_to_front(trainer: Trainer, callback: Callback) -> None:
    """Let ``callback`` run first, wherever the user listed it. Call it in ``setup``."""
    others = [c for c in trainer.callbacks if c is not callback]  # type: ignore[attr-defined]
    trainer.callbacks = [callback, *others]  # type: ignore[attr-defined]


def move_to_end(trainer: Trainer, callback: Callback) -> None:
    """Let ``callback`` run after all others but those that save. Call it in ``setup``."""
    others = [c for c in trainer.callbacks if c is not callback]  # type: ignore[attr-defined]
    saving = [c for c in others if isinstance(c, Checkpoint)]
    trainer.callbacks = [*(c for c in others if c not in saving), callback, *saving]  # type: ignore[attr-defined]


def settle(trainer: Trainer) -> None:
    """Let callbacks with a ``before_save`` finish what a checkpoint has to wait for. Every rank calls it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        before_save = getattr(callback, "before_save", None)
        if before_save is not None:
            before_save(trainer)


def in_doubt(trainer: Trainer) -> bool:
    """Whether a callback with an ``in_doubt`` would rather have the next update judged before this state is kept.

    The same on every rank, after ``settle``.
    """
    return any(bool(getattr(callback, "in_doubt", False)) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def move_to_place(trainer: Trainer, callback: Callback) -> None:
    """Let ``callback`` run right behind those that say they come before it, wherever the user listed it.

    The others keep their order. Call it in ``setup``.
    """
    others = [c for c in trainer.callbacks if c is not callback]  # type: ignore[attr-defined]
    earlier = [i for i, c in enumerate(others) if getattr(c, "order", place(callback)) < place(callback)]
    at = earlier[-1] + 1 if earlier else 0
    trainer.callbacks = [*others[:at], callback, *others[at:]]  # type: ignore[attr-defined]


def move_behind(trainer: Trainer, callback: Callback, others: Collection[Callback]) -> None:
    """Let ``others`` run after ``callback``, those that already do where they are. Call it in ``setup``."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    at = callbacks.index(callback)
    early = [c for c in callbacks[:at] if c in others]
    stay = [c for c in callbacks[:at] if c not in early]
    trainer.callbacks = [*stay, callback, *early, *callbacks[at + 1 :]]  # type: ignore[attr-defined]
