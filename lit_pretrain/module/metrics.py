"""Loss over tokens, as sums that add up over batches and ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

if TYPE_CHECKING:
    from torch import Tensor


class TokenLoss(Metric):
    """Token-weighted mean of the negative log-likelihood, and what follows from it.

    ``compute`` returns the mean in nats per token (NaN before the first token). ``perplexity`` is exp of that mean, not
    a mean of exponentials, and overflows to inf. ``bits_per_byte`` divides by the UTF-8 bytes that the targets stand
    for, so it compares across tokenizers.
    """

    full_state_update = False
    nll_sum: Tensor
    num_targets: Tensor
    num_bytes: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("nll_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_targets", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("num_bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll_sum: Tensor, num_targets: Tensor, num_bytes: Tensor | int = 0) -> None:
        """Add a batch.

        Args:
            nll_sum: Sum of -log p over valid targets in nats, 0-d.
            num_targets: Valid targets, 0-d.
            num_bytes: UTF-8 bytes of those targets; 0 when unknown.
        """
        # Not in place: a reset within inference mode (Trainer.validate) leaves states that training may not change.
        self.nll_sum = self.nll_sum + nll_sum.detach().to(self.nll_sum.dtype)
        self.num_targets = self.num_targets + num_targets
        self.num_bytes = self.num_bytes + num_bytes

    def compute(self) -> Tensor:
        """Mean negative log-likelihood in nats per token, 0-d."""
        return self.nll_sum / self.num_targets

    def summary(self) -> dict[str, Tensor]:
        """``loss``, ``perplexity`` and, when bytes are known, ``bits_per_byte``, each 0-d. Synchronises all ranks.

        Empty where no rank saw a token: a source without held-out text has no loss to report.
        """
        with self.sync_context(should_sync=self._to_sync):
            if int(self.num_targets) == 0:  # inside: every rank must decide alike
                return {}
            loss = self.nll_sum / self.num_targets
            out = {"loss": loss, "perplexity": loss.exp()}
            if int(self.num_bytes) > 0:
                out["bits_per_byte"] = self.nll_sum / math.log(2) / self.num_bytes
        return out
