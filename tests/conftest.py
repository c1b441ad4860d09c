"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leaks import no_leaks
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[1]


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
