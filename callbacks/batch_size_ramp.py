"""Small batches at the beginning, where gradients agree anyway, and large ones later."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.callbacks.order import Order
from lit_pretrain.checks import number, whole
from lit_pretrain.errors import ConfigError


class BatchSizeRamp(Callback):
    """Raises the number of microbatches per update from ``start_share`` of the trainer's to all of it.

    The ramp is a staircase over the first ``updates`` updates, as even as whole microbatches allow. The microbatches
    are those of a run without it, in the same order; only the updates between them are more. A step is taken where a
    window of the new size can begin: after a multiple of it in the epoch. Tokens are counted as they are used, by
    ``RunCounters`` and by schedules in tokens; a schedule in updates sees the updates.

    Logs ``optim/batch_share`` where the trainer logs.

    Args:
        start_share: First share of the trainer's ``accumulate_grad_batches``, above 0 and below 1; at least one
            microbatch.
        updates: Length of the ramp.

    Raises:
        ConfigError: A setting is out of range; before the first step, where the trainer accumulates nothing, or beside
            ``LossSpikeRollback``, whose positions count updates of one size.

    Source: Brown et al. 2020 (GPT-3), appendix B: a linear increase over the first 4 to 12 billion tokens.
    """

    order: ClassVar[int] = Order.RESUME + 2

    def __init__(self, *, start_share: float = 0.125, updates: int) -> None:
        number("ramp.start_share", start_share, above=0.0)
        if start_share >= 1.0:
            raise ConfigError(f"ramp.start_share={start_share} must be below 1; leave the callback out for no ramp.")
        whole("ramp.updates", updates, least=1)
        self.start_share = start_share
        self.updates = updates
        self.full_accumulation = 0  # the trainer's; 0 before training
        self._now: int | None = None
        self._schedule: LearningRateSchedule | None = None

    def wanted(self, update: int) -> int:
        """Microbatches of the update that follows ``update`` others."""
        full = self.full_accumulation
        first = max(1, round(self.start_share * full))
        return min(full, first + (full - first) * update // self.updates)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
        if stage != "fit":
            return
        self._now = None
        self.full_accumulation = int(trainer.accumulate_grad_batches)
        if self.full_accumulation < 2:
            raise ConfigError(
                f"BatchSizeRamp makes updates of fewer microbatches, and trainer.accumulate_grad_batches="
                f"{self.full_accumulation}; use smaller microbatches and accumulate more of them."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        names = [type(c).__name__ for c in callbacks if hasattr(c, "rollbacks") and getattr(c, "mode", "") != "warn"]
        if names:
            raise ConfigError(
                f"BatchSizeRamp and {names[0]} cannot be used together: a rollback counts data in updates of one size; "
                "use callbacks.rollback.mode=warn until the ramp is over."
            )
        self._schedule = next((c for c in callbacks if isinstance(c, LearningRateSchedule)), None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on where a checkpoint stood."""
        self._set(trainer, self._now if self._now is not None else self.wanted(trainer.global_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """At a window's start, take the next step if a window of that size can begin here."""
        current = trainer.accumulate_grad_batches
        wanted = self.wanted(trainer.global_step)
        if batch_idx % current == 0 and wanted != current and batch_idx % wanted == 0:
            rank_zero_info(
                f"Update {trainer.global_step}: {wanted} microbatches per update from here, {current} before."
            )
            self._set(trainer, wanted)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the size."""
        if not _compat.accumulates(trainer) and _compat.should_log(trainer):
            _compat.log(trainer, {"optim/batch_share": trainer.accumulate_grad_batches / self.full_accumulation})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the trainer as it was."""
        self._restore(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the trainer as it was."""
        self._restore(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The size of the window that comes next, which may wait for its place."""
        return {"now": self._now}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with it."""
        self._now = state_dict["now"]

    def _set(self, trainer: Trainer, number: int) -> None:
        self._now = number
        loops.set_accumulation(trainer, number)
        if self._schedule is not None:
            self._schedule.use_share(number / self.full_accumulation)

    def _restore(self, trainer: Trainer) -> None:
        if self.full_accumulation:
            loops.set_accumulation(trainer, self.full_accumulation)
        if self._schedule is not None:
            self._schedule.use_share(1.0)
