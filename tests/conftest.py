"""Fixtures for every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leaks import no_leaks
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """A shell starts what it puts in the background deaf to Ctrl-C, and so would be every process of a test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What the imports made stays until the end: no collection of garbage has to walk through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    with no_leaks(ROOT):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(2, fn, *args)`` calls ``fn`` on two ranks; see RankPool."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT
