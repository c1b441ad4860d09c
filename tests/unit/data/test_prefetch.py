"""The prefetch thread: order, bound, errors, and that it ends."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from lit_pretrain.data.prefetch import prefetch


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lit-pretrain-prefetch"]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 5
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_values_in_order(depth: int) -> None:
    assert list(prefetch(lambda position: position * 10, range(5, 30), depth=depth)) == list(range(50, 300, 10))
    assert not alive()


def test_at_most_depth_values_wait() -> None:
    made: list[int] = []

    def make(position: int) -> int:
        made.append(position)
        return position

    values = prefetch(make, range(100), depth=2)
    assert not alive()  # nothing before the first value is asked for
    assert next(values) == 0
    wait_for(lambda: len(made) >= 4)  # one taken, two waiting, one in the thread's hand
    time.sleep(0.02)
    assert made == [0, 1, 2, 3]
    values.close()  # type: ignore[attr-defined]
    assert not alive()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_where_its_value_would(depth: int) -> None:
    def make(position: int) -> int:
        if position == 3:
            raise OSError("disk gone")
        return position

    values = prefetch(make, range(10), depth=depth)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(values)
    assert not alive()


def test_a_forgotten_iterator_ends_its_thread() -> None:
    values = prefetch(lambda position: bytes(10), range(10**9), depth=2)
    next(values)
    assert len(alive()) == 1
    del values
    gc.collect()
    assert not alive()
