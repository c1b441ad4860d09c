"""One thread that makes the next batches while the current one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _End:
    pass


def prefetch(make: Callable[[int], T], positions: range, *, depth: int) -> Iterator[T]:
    """``make(position)`` for each position in order, up to ``depth`` of them made ahead in a thread.

    The thread starts at the first ``next`` and has ended when the iterator is exhausted, closed or collected. An
    exception in ``make`` is raised where its value would have come.

    Args:
        make: Pure: it runs in the thread, also for values that nobody will take.
        positions: What to make.
        depth: 0 makes each value when it is asked for, without a thread.
    """
    if depth == 0:
        for position in positions:
            yield make(position)
        return
    ready: queue.Queue[T | _Failure | _End] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(
        target=_work, args=(make, positions, ready, stop), name="lit-pretrain-prefetch", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # the thread may wait for room in the queue
            try:
                ready.get_nowait()
            except queue.Empty:
                thread.join(0.01)


def _work(
    make: Callable[[int], T], positions: range, ready: queue.Queue[T | _Failure | _End], stop: threading.Event
) -> None:
    try:
        for position in positions:
            if stop.is_set():
                return
            ready.put(make(position))
        ready.put(_End())
    except BaseException as error:  # handed to the thread that waits for the batch
        ready.put(_Failure(error))
