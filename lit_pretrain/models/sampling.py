"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_pretrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn.

    Args:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw from the k most likely tokens only; None for all.
        top_p: Draw from the fewest tokens whose probabilities reach this sum; None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature!r} must be a finite number of at least 0.")
        if self.top_k is not None and (not _is_number(self.top_k) or self.top_k != int(self.top_k) or self.top_k < 1):
            raise ConfigError(
                f"top_k={self.top_k!r} must be a whole number of at least 1; leave it out for all tokens."
            )
        if self.top_p is not None and (not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p={self.top_p!r} must be above 0 and at most 1; leave it out for all tokens.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 2**63


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from, (B, V), float64, at a temperature above 0.

    Top-k is applied first, then top-p to what is left, both after the temperature. Equal logits at the edge of top-k
    all stay.

    Args:
        logits_BV: Logits; -inf is never drawn.
        sampling: Temperature above 0, top-k, top-p.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """
    logits_BV = logits_BV.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    p_BV = logits_BV.softmax(dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True)
        # A token stays while those before it fall short of top_p: so the first always stays.
        before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
        kept_BV = torch.zeros_like(p_BV, dtype=torch.bool).scatter(1, order_BV, before_BV < sampling.top_p)
        p_BV = p_BV.masked_fill(~kept_BV, 0.0)
    return p_BV


def draw(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """The next token of each row, (B,), int64.

    Args:
        logits_BV: Logits; -inf is never drawn.
        sampling: How to draw.
        uniform_B: One number in [0, 1) a row, float64; the draw is a function of it.
    """
    if sampling.temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    cumulative_BV = probabilities(logits_BV, sampling).cumsum(dim=-1)
    # right=True: the first token whose cumulative share is above the number, so never one of probability 0.
    point_B1 = uniform_B.to(cumulative_BV.device)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, point_B1, right=True)[:, 0]
