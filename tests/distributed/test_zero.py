"""Sharded data parallelism equals one process, in float64."""

from __future__ import annotations

import functools

import pytest

from tests.support.parity import BOUND, differences, train


@functools.cache
def reference(style, tied, accumulate):
    return train("auto", style=style, tied=tied, accumulate=accumulate)


def run(strategy, settings):
    return train(strategy, **settings)


def check(ranks, world, strategy, *, style="gpt2", tied=True, accumulate=1):
    settings = {"style": style, "tied": tied, "accumulate": accumulate, "devices": world}
    want = reference(style, tied, accumulate)
    assert max(want["norms"]) > 0.2  # clipping is at work
    for got in ranks(world, run, strategy, settings):
        found = differences(got, want)
        assert all(value <= BOUND for value in found.values()), found
        assert got["val"] == pytest.approx(want["val"], rel=1e-6)  # logged as float32
        assert got["sharded"]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_on_two_ranks(ranks, stage, accumulate):
    check(ranks, 2, {"stage": stage}, accumulate=accumulate, style="llama" if accumulate == 3 else "gpt2")


def test_stage_three_on_four_ranks(ranks):
    check(ranks, 4, {"stage": 3}, tied=False)


def test_hybrid_sharding(ranks):
    check(ranks, 4, {"stage": 3, "replicate_size": 2}, style="llama")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_other_stage_on_four_ranks(ranks, stage):
    check(ranks, 4, {"stage": stage}, tied=stage != 1)
