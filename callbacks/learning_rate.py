"""The one mechanism behind every learning-rate schedule callback."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._rates import GroupRates
from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules import Horizon, check
from lit_pretrain.specs import TokenAccounting

_STATE_KEY = "lit_pretrain.LearningRateSchedule"


class LearningRateSchedule(Callback):
    """Writes ``group["lr"] = peak of that group x curve(counter) x cuts`` before every training batch.

    The counter is the number of updates that were really applied (an update dropped by a gradient scaler or by a
    callback does not count), or the tokens those updates used when the run is measured in tokens. Nothing is stepped,
    so nothing can be stepped twice; the counter, the peaks, a derived horizon and all cuts are in the checkpoint.

    The peaks are the rates the optimizer was configured with. A rate that someone else changes between two writes is
    kept as a factor on that group from then on (except for rates held in CUDA tensors, which are not read back).

    Args:
        warmup_steps: Warmup in updates. Exactly one of the three ``warmup_*`` must be given.
        warmup_tokens: Warmup in tokens over all data-parallel ranks.
        warmup_fraction: Warmup as a share of the horizon, 0 to 1.
        total_steps: Horizon in updates; the curve is then a function of applied updates.
        total_tokens: Horizon in tokens; the curve is then a function of tokens. With neither, the horizon is what
            the trainer will run (``max_steps``, or ``max_epochs`` times the loader), looked up once and kept in the
            checkpoint; it is counted in tokens if the warmup is.
        min_ratio: Last rate over peak rate.
        start_lr: Rate of the first update for the group with the highest peak; others in proportion.
        start_ratio: First rate over peak rate. With neither, the first update runs at ``peak / warmup``.
        tokens_per_update: Tokens of one update over all data-parallel ranks; None asks the data module.

    Raises:
        ConfigError: For settings that exclude each other, at construction; for a scheduler configured in the module,
            a second schedule callback, several optimizers or a missing horizon, before the first step.
    """

    order: ClassVar[int] = Order.LEARNING_RATE
    needs_horizon: ClassVar[bool] = True

    def __init__(
        self,
        *,
        warmup_steps: int | None = None,
        warmup_tokens: int | None = None,
        warmup_fraction: float | None = None,
        total_steps: int | None = None,
        total_tokens: int | None = None,
        min_ratio: float = 0.1,
        start_lr: float | None = None,
        start_ratio: float | None = None,
        tokens_per_update: int | None = None,
    ) -> None:
        self.horizon = self._given = Horizon(
            warmup_steps=warmup_steps,
            warmup_tokens=warmup_tokens,
            warmup_fraction=warmup_fraction,
            total_steps=total_steps,
            total_tokens=total_tokens,
        )
        if start_lr is not None and start_ratio is not None:
            raise ConfigError(
                f"schedule.start_lr={start_lr} and schedule.start_ratio={start_ratio} exclude each other."
            )
        if start_lr is not None and not start_lr > 0:
            raise ConfigError(f"schedule.start_lr={start_lr} must be above 0: a rate of 0 wastes the first update.")
        if tokens_per_update is not None and tokens_per_update < 1:
            raise ConfigError(f"schedule.tokens_per_update={tokens_per_update} must be at least 1.")
        check(warmup=0, total=math.inf, min_ratio=min_ratio, start_ratio=start_ratio)
        self.min_ratio = min_ratio
        self.start_lr = start_lr
        self.start_ratio = start_ratio
        self.tokens_per_update = tokens_per_update
        self._hook: RemovableHandle | None = None
        self._datamodule: object = None
        self._told_tokens: int | None = None
        self._start: float | None = start_ratio
        self._reset()

    def _reset(self) -> None:
        self._updates = 0
        self._tokens = 0
        self._rates = GroupRates()
        self._cuts: list[tuple[float, int | None]] = []
        self._followed: Callable[[int], float] | None = None
        self._share = 1.0
        self._trainer_updates: float | None = None  # what the trainer would run, looked up once
        self._restored = False

    # What a subclass says, and what others may ask.

    @abstractmethod
    def curve(self, x: float, *, warmup: float, total: float, unit: float, start_ratio: float | None) -> float:
        """Share of the peak for an update that starts at ``x`` and uses ``unit``; see ``lit_pretrain.schedules``."""

    @property
    def state_key(self) -> str:
        """Tells the curves apart, so that two of them in one trainer reach our own refusal."""
        return f"{_STATE_KEY}[{type(self).__name__}]"

    @property
    def applied_updates(self) -> int:
        """Optimizer updates applied so far."""
        return self._updates

    @property
    def applied_tokens(self) -> int:
        """Tokens those updates used, over all data-parallel ranks; 0 where nobody says how many an update uses."""
        return self._tokens

    def factor(self) -> float:
        """Share of its peak that every group gets for the coming update, cuts of this callback included."""
        unit = self._unit()
        x = self._tokens if self.horizon.in_tokens else self._updates
        warmup, total = self.horizon.resolve(
            self._trainer_updates, tokens_per_update=self._tokens_per_update(), endless=not self.needs_horizon
        )
        value = self.curve(x, warmup=warmup, total=total, unit=unit, start_ratio=self._start)
        for cut, until in self._cuts:
            if until is None or self._updates < until:
                value *= cut
        return value if self._followed is None else value * self._followed(self._updates)

    def follow(self, factor: Callable[[int], float] | None) -> None:
        """Multiply ``factor(applied updates)`` into every rate; None ends it.

        For a factor that its owner can tell at any update of the run: nothing of it is saved here.
        """
        self._followed = factor

    def update_uses(self, tokens: int) -> None:
        """Somebody who counts them says how many tokens an update uses; what the user or the data module says wins."""
        self._told_tokens = tokens

    def use_share(self, share: float) -> None:
        """Updates from here on use this share of the tokens that an update of full size does."""
        self._share = share

    def end_at(self, tokens: int) -> None:
        """Let the curve end after so many tokens that count: who ends the run says when.

        Call it before training starts, or later for a curve that is the same up to here. Nothing of it is saved.

        Raises:
            ConfigError: The user has given the schedule an end of its own.
        """
        given = self._given
        if given.total_steps is not None or given.total_tokens is not None:
            name = "total_steps" if given.total_steps is not None else "total_tokens"
            raise ConfigError(
                f"schedule.{name}={getattr(given, name)} and the run's budget of {tokens:,} tokens would both say "
                f"where the learning rate ends; leave schedule.{name} out."
            )
        self.horizon = replace(given, total_tokens=tokens)

    def cut(self, factor: float, *, until_update: int | None = None) -> None:
        """Multiply all rates by ``factor`` from the next batch on; the cut is saved and survives a resume.

        Args:
            factor: Above 0. Several cuts multiply.
            until_update: The cut ends when this many updates have been applied; None means it stays.

        Raises:
            ConfigError: If the factor is not above 0.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"schedule.cut(factor={factor}) must be a finite number above 0.")
        self._cuts.append((float(factor), until_update))

    def rewind(self, *, applied_updates: int, applied_tokens: int) -> None:
        """Set the counters after the weights were set back to an earlier update; cuts stay.

        Whatever rates the optimizer holds now are overwritten at the next batch, not taken for someone's cut.
        """
        self._updates, self._tokens = applied_updates, applied_tokens
        self._rates.forget_written()

    # Lightning's hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second schedule; forget an earlier run of another trainer."""
        if stage != "fit":
            return
        schedules = [c for c in trainer.callbacks if isinstance(c, LearningRateSchedule)]  # type: ignore[attr-defined]
        if len(schedules) > 1:
            names = " and ".join(type(c).__name__ for c in schedules)
            raise ConfigError(f"callbacks hold {names}, and each would write the learning rate; keep one of them.")
        if trainer.global_step == 0:
            self._reset()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a second owner of the rate, and note the peaks before a checkpoint overwrites them."""
        if trainer.lr_scheduler_configs:
            theirs = " and ".join(type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs)
            raise ConfigError(
                f"{type(self).__name__} and the scheduler of {type(pl_module).__name__}.configure_optimizers "
                f"({theirs}) would both set the learning rate; remove the callback or return only the optimizer."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"{type(self).__name__} drives one optimizer, and {type(pl_module).__name__}.configure_optimizers "
                f"returned {len(trainer.optimizers)}; use schedulers of your own there."
            )
        # Lightning restores callbacks before this hook, or after it for strategies that load after their setup;
        # GroupRates takes either order.
        self._rates.configure(trainer.optimizers[0].param_groups)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix the horizon, check the curve, and start counting."""
        self._datamodule = getattr(trainer, "datamodule", None)
        if not self._restored and self._updates == 0 and trainer.global_step > 0:
            warnings.warn(
                f"The checkpoint holds no state of {type(self).__name__}; it starts at update {trainer.global_step}.",
                stacklevel=2,
            )
            self._updates = trainer.global_step
            self._tokens = trainer.global_step * int(self._tokens_per_update() or 0)
        if self.horizon.needs_trainer(endless=not self.needs_horizon):
            self._look_up_horizon(trainer)
        if self.start_lr is not None:
            self._start = self.start_lr / max(self._rates.peaks)
        self.factor()  # refuses a curve that cannot be drawn
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, Optimizer):
            self._hook = optimizer.register_step_post_hook(self._count)
        # Engines that bring an optimizer of their own (DeepSpeed) have no such hook: follow the trainer's counter.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Write this batch's rates."""
        if self._hook is None:
            self._add(trainer.global_step - self._updates)
        rates = self._rates.write(trainer.optimizers[0].param_groups, self.factor())
        if not _compat.accumulates(trainer) and _compat.should_log(trainer):  # once per update
            _compat.log(trainer, self._rates.metrics(rates))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting."""
        self._unhook()
        self._restored = False
        self._rates.forget_restored()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._unhook()

    def state_dict(self) -> dict[str, Any]:
        """Plain containers only."""
        return {
            "curve": type(self).__name__,
            "applied_updates": self._updates,
            "applied_tokens": self._tokens,
            "trainer_updates": self._trainer_updates,
            "rates": self._rates.state_dict(),
            "cuts": [list(cut) for cut in self._cuts],
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the place of a run that was started with another curve."""
        for key, state in checkpoint.get("callbacks", {}).items():
            if key.startswith(f"{_STATE_KEY}[") and key != self.state_key:
                warnings.warn(f"{type(self).__name__} goes on where {state['curve']} stopped.", stacklevel=2)
                self.load_state_dict(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where ``state_dict`` left off."""
        self._updates = int(state_dict["applied_updates"])
        self._tokens = int(state_dict["applied_tokens"])
        self._trainer_updates = state_dict["trainer_updates"]
        self._rates.load_state_dict(state_dict["rates"])
        self._cuts = [(float(cut), until) for cut, until in state_dict["cuts"]]
        self._restored = True

    # The work.

    def _tokens_per_update(self) -> int | None:
        if self.tokens_per_update is not None:
            return self.tokens_per_update
        if isinstance(self._datamodule, TokenAccounting):
            return self._datamodule.tokens_per_update
        return self._told_tokens

    def _unit(self) -> float:
        if not self.horizon.in_tokens:
            return 1
        tokens = self._tokens_per_update()
        if tokens is None:
            raise ConfigError(
                f"{type(self).__name__} counts tokens, and nobody says how many an update uses; set "
                "schedule.tokens_per_update, or use a data module with a tokens_per_update property."
            )
        return tokens * self._share

    def _look_up_horizon(self, trainer: Trainer) -> None:
        updates = trainer.estimated_stepping_batches
        if self._trainer_updates is None:
            if not (math.isfinite(updates) and updates > 0):
                raise ConfigError(
                    f"{type(self).__name__} needs an end and the trainer has none (trainer.max_steps="
                    f"{trainer.max_steps}, trainer.max_epochs={trainer.max_epochs}); set schedule.total_steps, "
                    "schedule.total_tokens or trainer.max_steps."
                )
            if _compat.is_debugging(trainer):
                # A run of a few batches has no room for the real warmup and decay; draw the curve's beginning instead.
                warmup = self.horizon.warmup_steps or math.ceil((self.horizon.warmup_tokens or 0) / self._unit())
                updates = max(updates, 100 * max(warmup, 1))
            self._trainer_updates = updates
        elif updates != self._trainer_updates and not _compat.is_debugging(trainer):
            warnings.warn(
                f"The learning rate keeps the horizon of {self._trainer_updates} updates it was started with, though "
                f"the trainer would now run {updates}; set schedule.total_steps to change it.",
                stacklevel=2,
            )

    def _count(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _compat.step_was_skipped(optimizer):
            self._add(1)

    def _add(self, updates: int) -> None:
        self._updates += updates
        self._tokens += updates * round((self._tokens_per_update() or 0) * self._share)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
