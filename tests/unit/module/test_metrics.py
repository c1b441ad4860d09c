"""Validation sums: token-weighted, never a mean of means."""

import math

import pytest
import torch

from lit_pretrain.module import TokenLoss


def test_token_weighted_mean_and_bits_per_byte():
    metric = TokenLoss()
    metric.update(torch.tensor(6.0), torch.tensor(2), torch.tensor(3))
    metric.update(torch.tensor(1.0), torch.tensor(5), 11)
    out = metric.summary()
    assert out["loss"].item() == pytest.approx(1.0)  # 7 nats over 7 tokens, not (3 + 0.2) / 2
    assert out["perplexity"].item() == pytest.approx(math.e)
    assert out["bits_per_byte"].item() == pytest.approx(7 / math.log(2) / 14)


def test_perplexity_overflows_to_inf():
    metric = TokenLoss()
    metric.update(torch.tensor(1e6), torch.tensor(1))
    out = metric.summary()
    assert out["perplexity"].item() == math.inf
    assert "bits_per_byte" not in out


def test_nothing_seen_is_nan_and_not_reported():
    assert math.isnan(TokenLoss().compute().item())
    assert TokenLoss().summary() == {}


def test_counts_stay_exact_beyond_float32():
    metric = TokenLoss()
    for _ in range(3):
        metric.update(torch.tensor(2.0**25), torch.tensor(2**25 + 1))
    assert int(metric.num_targets) == 3 * 2**25 + 3


def test_goes_on_after_a_reset_in_inference_mode():
    """``Trainer.validate`` before ``Trainer.fit``: the states are then inference tensors."""
    metric = TokenLoss()
    with torch.inference_mode():
        metric.reset()
    metric.update(torch.tensor(6.0), torch.tensor(2), torch.tensor(3))
    assert metric.compute().item() == 3.0
