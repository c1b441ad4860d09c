"""How long training steps take and how many tokens they use: arithmetic, no Lightning and no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Pausable(Protocol):
    """A callback that times training. Call this before work in a training hook that is not training."""

    def pause_timing(self) -> None:
        """Do not count what happens until the next training batch."""
        ...


def pause_timing_of(callbacks: Iterable[object]) -> None:
    """Pause every callback that times training: what comes next is not training."""
    for callback in callbacks:
        if isinstance(callback, Pausable):
            callback.pause_timing()


@dataclass
class _Update:
    seconds: float = 0.0
    data_seconds: float = 0.0
    tokens: float = 0.0


class StepMeter:
    """A sliding window over optimizer updates.

    An update lasts from the end of the one before to its own end, so it carries the wait for its own data. After a
    pause (validation, a checkpoint, sampling) it starts with its first batch instead, and its data wait is unknown,
    taken as 0.

    Args:
        window: Updates to average over.
        ignore: First updates to leave out: compilation, memory growth, cold caches.
        clock: Seconds, monotonic.
    """

    def __init__(self, *, window: int, ignore: int, clock: Callable[[], float]) -> None:
        self._updates: deque[_Update] = deque(maxlen=window)
        self._left_out = ignore
        self._clock = clock
        self._current = _Update()
        self._last_end: float | None = None
        self._began: float | None = None

    def batch_start(self) -> None:
        """A batch has arrived."""
        now = self._clock()
        if self._last_end is not None:
            self._current.data_seconds += now - self._last_end
        self._began = now if self._last_end is None else self._last_end

    def batch_end(self, *, tokens: float, completes_update: bool) -> None:
        """A batch is done.

        Args:
            tokens: What it used, over all ranks.
            completes_update: The optimizer ran.
        """
        now = self._clock()
        if self._began is None:  # attached in the middle of a batch
            return
        self._current.seconds += now - self._began
        self._current.tokens += tokens
        self._began, self._last_end = None, now
        if not completes_update:
            return
        if self._left_out > 0:
            self._left_out -= 1
        else:
            self._updates.append(self._current)
        self._current = _Update()

    def pause(self, *, drain: Callable[[], None] | None = None) -> None:
        """Something else than training begins.

        Args:
            drain: Waits for work that training has queued on the device; that wait is training time.
        """
        if self._last_end is None:
            return
        if drain is not None:
            before = self._clock()
            drain()
            last = self._updates[-1] if self._updates and self._current == _Update() else self._current
            last.seconds += self._clock() - before
        self._last_end = None

    @property
    def seconds_per_update(self) -> float | None:
        """Mean over the window; None before anything was measured."""
        return sum(u.seconds for u in self._updates) / len(self._updates) if self._updates else None

    @property
    def data_seconds_per_update(self) -> float | None:
        """Mean wait for data over the window."""
        return sum(u.data_seconds for u in self._updates) / len(self._updates) if self._updates else None

    @property
    def tokens_per_second(self) -> float | None:
        """Over the window."""
        seconds = sum(u.seconds for u in self._updates)
        return sum(u.tokens for u in self._updates) / seconds if seconds > 0 else None
