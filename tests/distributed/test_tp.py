"""Tensor parallelism, alone and with sharding, equals one process, in float64."""

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
    for got in ranks(world, run, strategy, settings):
        found = differences(got, want)
        assert all(value <= BOUND for value in found.values()), found
        assert got["val"] == pytest.approx(want["val"], rel=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("style", "tied"), [("gpt2", True), ("llama", False)])
def test_two_ranks(ranks, style, tied, sequence_parallel):
    strategy = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    check(ranks, 2, strategy, style=style, tied=tied, accumulate=3 if tied else 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_sharding_times_tensor_parallelism(ranks, stage):
    check(
        ranks,
        4,
        {"tensor_parallel_size": 2, "stage": stage},
        style="llama" if stage else "gpt2",
        tied=False,
        accumulate=stage or 1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_four_ranks(ranks, style, sequence_parallel):
    check(ranks, 4, {"tensor_parallel_size": 4, "sequence_parallel": sequence_parallel}, style=style, tied=True)
