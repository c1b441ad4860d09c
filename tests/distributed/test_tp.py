"""Tensor parallelism, alone and with sharding, equals one process, in float64."""

from __future__ import annotations

import pytest

from tests.support.parity import check


def test_two_ranks(ranks):
    models = ({"accumulate": 3}, {"style": "llama", "tied": False})
    tp = {"tensor_parallel_size": 2}
    check(ranks, 2, [({**tp, "sequence_parallel": split}, model) for split in (False, True) for model in models])


def test_sharding_times_tensor_parallelism(ranks):
    tp = {"tensor_parallel_size": 2}
    llama = {"style": "llama", "tied": False, "accumulate": 3}
    check(ranks, 4, [({**tp, "stage": 0}, {"tied": False}), ({**tp, "stage": 3}, llama)])


@pytest.mark.slow
def test_four_ranks(ranks):
    styles, tp = ("gpt2", "llama"), {"tensor_parallel_size": 4}
    check(ranks, 4, [({**tp, "sequence_parallel": s}, {"style": style}) for s in (False, True) for style in styles])
