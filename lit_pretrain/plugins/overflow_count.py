"""Updates with non-finite gradients where nobody skips them: counted without a wait, and never in silence."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lit_pretrain.plugins.gradient_checks import first_non_finite


class OverflowCount:
    """Counts on the device; on a CPU, and where it logs anyway, it also reads, reports and stops.

    Args:
        limit: So many in a row stop the run.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._total: Tensor | int = 0
        self._in_a_row: Tensor | int = 0
        self._reported = 0

    @property
    def total(self) -> int:
        """So far, over all resumes. Waits for the device."""
        return int(self._total)

    def add(self, found: Tensor, module: pl.LightningModule, *, reads: bool) -> None:
        """Count an update. Every rank calls it, before anybody takes the gradients away.

        Args:
            found: 1 where any gradient on any rank is not finite, else 0.
            module: Whose gradients they are.
            reads: Wait for the device and look.

        Raises:
            FloatingPointError: As many in a row as the limit.
        """
        self._total = self._total + found
        self._in_a_row = (self._in_a_row + 1) * found
        if not reads and found.device.type != "cpu":
            return
        in_a_row, total = int(self._in_a_row), int(self._total)
        if total == self._reported:
            return
        self._reported = total
        step, world_size = module.trainer.global_step, module.trainer.world_size
        # Ranks agree on the counts, so all of them come here.
        name = first_non_finite(module, world_size=world_size) if in_a_row else "some parameter"
        if in_a_row >= self.limit:
            raise FloatingPointError(
                f"Update {step}: {in_a_row} updates in a row had gradients that are not finite, this one that of "
                f"{name}, at a loss scale of 1 (bf16). Look at the batch and the learning rate of the first of them."
            )
        warnings.warn(
            f"Update {step}: the gradient of {name} is not finite ({total} such updates so far, {in_a_row} in a row).",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"total": int(self._total), "in_a_row": int(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._total, self._in_a_row = int(state["total"]), int(state["in_a_row"])
        self._reported = self._total
