"""How a mixture of sources moves over a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks.order import Order
from lit_pretrain.checks import whole
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import MixturePlan


class DataAnnealing(Callback):
    """Reports the data plan's weights; the plan itself (``data.weights``) is their only owner.

    Logs ``data/share/SOURCE`` (share of the global batch being read) and ``data/passes/SOURCE`` (passes over the source
    so far), and says at the start at which updates the mixture changes most.

    Args:
        num_points: Places of the run that the announcement at the start shows.

    Raises:
        ConfigError: Before the first step, where the data module has no plan of a mixture.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(self, *, num_points: int = 5) -> None:
        whole("annealing.num_points", num_points, least=2, most=100)
        self.num_points = num_points
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is to come."""
        plan = self._plan(trainer)
        total = trainer.estimated_stepping_batches
        if not (0 < total < float("inf")):
            return
        steps = [round(i * (total - 1) / (self.num_points - 1)) for i in range(self.num_points)]
        names = list(plan.shares(0))
        width = max(map(len, names))
        lines = [f"  {'update':<{width}}" + "".join(f"{step:>10,}" for step in steps)]
        for name in names:
            shares = "".join(f"{100 * plan.shares(step)[name]:>9.1f}%" for step in steps)
            lines.append(f"  {name:<{width}}{shares}")
        rank_zero_info("\n".join(["The mixture over the run:", *lines]))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note which data step is read: the batch says it, whatever was left out before."""
        if isinstance(batch, Mapping) and isinstance(batch.get("index"), int):
            self._step = batch["index"] // trainer.accumulate_grad_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log where the trainer logs."""
        if _compat.accumulates(trainer) or not _compat.should_log(trainer):
            return
        plan = self._plan(trainer)
        figures = {f"data/share/{name}": share for name, share in plan.shares(self._step).items()}
        figures |= {f"data/passes/{name}": passes for name, passes in plan.epochs(self._step + 1).items()}
        _compat.log(trainer, figures)

    @staticmethod
    def _plan(trainer: Trainer) -> MixturePlan:
        plan = getattr(getattr(trainer, "datamodule", None), "plan", None)
        if not isinstance(plan, MixturePlan):
            raise ConfigError(
                "DataAnnealing reports the plan of a data module, and this one has none; use TokenDataModule, or leave "
                "the callback out."
            )
        return plan
