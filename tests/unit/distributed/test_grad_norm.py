from __future__ import annotations

import pytest
import torch

from lit_pretrain.distributed import global_norm


def test_by_hand():
    # 3-4-12-84-85: nested Pythagorean quadruples.
    got = global_norm([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]]), torch.tensor(84.0)])
    assert got.shape == ()
    assert got.item() == 85.0
    assert global_norm([]).item() == 0.0


def test_sixteen_bits_neither_overflow_nor_vanish():
    # 300 squared is beyond half precision; the squares of 1e-4 are below its smallest number.
    assert global_norm([torch.full((16,), 300.0, dtype=torch.float16)]).item() == 1200.0
    tiny = torch.full((10_000,), 1e-4, dtype=torch.float16)
    assert global_norm([tiny]).item() == pytest.approx(1e-2, rel=1e-3)
    assert global_norm([tiny]).dtype == torch.float32


def test_mixed_types_and_double():
    got = global_norm([torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.float64)])
    assert got.item() == 5.0
    assert global_norm([torch.tensor([1e200], dtype=torch.float64)]).item() == 1e200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_shows(value):
    assert not torch.isfinite(global_norm([torch.ones(5), torch.tensor([1.0, value])]))
