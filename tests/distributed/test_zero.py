"""Sharded data parallelism equals one process, in float64."""

from __future__ import annotations

import pytest

from tests.support.parity import check


def test_each_stage_on_two_ranks(ranks):
    cases = [({"stage": stage}, {}) for stage in range(4)]
    check(ranks, 2, cases + [({"stage": stage}, {"accumulate": 3, "style": "llama"}) for stage in range(4)])


def test_four_ranks(ranks):
    hybrid = {"stage": 3, "replicate_size": 2}
    check(ranks, 4, [({"stage": 3}, {"tied": False}), (hybrid, {"style": "llama"})])


@pytest.mark.slow
def test_each_other_stage_on_four_ranks(ranks):
    check(ranks, 4, [({"stage": stage}, {"tied": stage != 1}) for stage in (0, 1, 2)])
