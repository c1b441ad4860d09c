"""A run that ends where more of it would not pay, and ends well."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from lit_pretrain import units
from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._agreement import Agreement
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._measuring.budget_summary import count_parameters, describe, name_limits
from lit_pretrain.callbacks._measuring.tokens import (
    TokensPerBatch,
    check_tokens_per_batch,
    data_parallel_size,
    full_accumulation,
)
from lit_pretrain.callbacks._saving.run_end import RunEnd
from lit_pretrain.callbacks.counters import RunCounters
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.callbacks.order import Order, move_to_place, settle
from lit_pretrain.callbacks.schedules import WarmupStableDecay
from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.budget import Budget
from lit_pretrain.planning.laws import FLOPS_PER_PARAMETER, LAWS
from lit_pretrain.specs import TokenAccounting

_ENDLESS = 10**18  # tokens; a curve that has not yet learnt its end
_LOSSES = ("val/loss", "val_loss", "train/loss", "train_loss", "loss")
_TIME, _END = "budget: time is up", "budget: end in tokens"


class ChinchillaBudget(Callback):
    """Stops at 20 tokens a parameter, or at a limit of FLOPs, tokens, hours or money, whichever comes first.

    Tokens are those that count (``RunCounters``), of the global batch, each once whatever the layout; the run ends
    with the first update that reaches the limit, whatever the trainer's minimum, and a resume of its end trains no
    more. What was spent (FLOPs, hours, money) counts also where a rollback took it back. Hours are of rank 0's
    clock, and all ranks stop at the same update.

    The learning-rate schedule, if it is one of ours, ends at the limit: its last update runs at the lowest rate. Limits
    of time are not known in tokens beforehand: with ``WarmupStableDecay`` the decay begins early enough to be over in
    time; any other curve needs an end of its own then (``trainer.max_steps``).

    Logs ``budget/fraction`` of the nearest limit, ``budget/tokens_per_parameter``, ``budget/hours_left`` and, with a
    price, ``budget/cost``. At the end there is a checkpoint, and a summary: printed, as text in TensorBoard and in
    ``budget.json``. The laws predict losses of language models: of modules with ``flops_per_token``, or data modules
    with ``tokens_per_update``.

    Args:
        ratio: Tokens per parameter, or None.
        max_tokens: Likewise; see ``lit_pretrain.planning.budget.Budget``, as for the others.
        max_flops: Model FLOPs spent.
        max_hours: Hours of training.
        max_cost: Money spent.
        price_per_device_hour: In the same money.
        min_gain: Nats that another 1e18 FLOPs have to gain.
        law: Predicts it: ``hoffmann`` or ``besiroglu``.
        count: Which parameters count: ``all``, or ``non_embedding``; the summary shows both.
        tokens_per_batch: As in ``RunCounters``, where the budget brings its own.
        loss: The logged loss that the summary compares with the laws; None takes ``val/loss``, ``val_loss``,
            ``train/loss``, ``train_loss`` or ``loss``, whichever is there first.

    Attributes:
        reason: Why it ended the run; None when it did not.
        summary: What it came to, plain; empty before the end.

    Raises:
        ConfigError: A limit is impossible, at construction; nobody counts tokens, or the schedule has an end of its
            own, before the first step.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(
        self,
        ratio: float | None = 20.0,
        *,
        max_tokens: float | None = None,
        max_flops: float | None = None,
        max_hours: float | None = None,
        max_cost: float | None = None,
        price_per_device_hour: float | None = None,
        min_gain: float | None = None,
        law: str = "hoffmann",
        count: Literal["all", "non_embedding"] = "all",
        tokens_per_batch: TokensPerBatch = None,
        loss: str | None = None,
    ) -> None:
        if count not in ("all", "non_embedding"):
            raise ConfigError(f"budget.count={count!r} is unknown; use all or non_embedding.")
        self.budget = Budget(
            ratio=ratio,
            max_tokens=max_tokens,
            max_flops=max_flops,
            max_hours=max_hours,
            max_cost=max_cost,
            price_per_device_hour=price_per_device_hour,
            min_gain=min_gain,
            law=law,
        )
        check_tokens_per_batch(tokens_per_batch, owner="budget")
        self.count = count
        self.tokens_per_batch = tokens_per_batch
        self.loss = loss
        self.agreement: Agreement | None = None
        self.reason: str | None = None
        self.summary: dict[str, Any] = {}
        self._counters = RunCounters()
        self._schedule: LearningRateSchedule | None = None
        self._parameters = {"all": 0, "non_embedding": 0}
        self._flops_per_token: float | None = None
        self._end_of_run = RunEnd("budget")
        self._end = 0  # tokens, fixed when a decay began for a limit of time; 0 before
        self._began = (0.0, 0.0)  # seconds and tokens read when this process began

    # ---------------------------------------------------------------- set-up

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Count parameters while they are whole; find the counters, or bring some."""
        if stage != "fit":
            return
        self._parameters = count_parameters(pl_module)
        if self.parameters == 0:
            raise ConfigError(
                f"budget.count={self.count} counts no trained parameter of this module; unfreeze some, or count all."
            )
        self.reason, self.summary, self._end = None, {}, 0
        found = [c for c in trainer.callbacks if isinstance(c, RunCounters)]  # type: ignore[attr-defined]
        if not found:
            found = [RunCounters()]
            found[0].setup(trainer, pl_module, stage)
            move_to_place(trainer, found[0])  # before those that save, whose checkpoint would lack an update
        self._counters = found[0]
        if self._counters.tokens_per_batch is None:
            self._counters.tokens_per_batch = self.tokens_per_batch
        callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        at = callbacks.index(self._counters) + 1  # counted before it is judged
        trainer.callbacks = [*callbacks[:at], self, *callbacks[at:]]  # type: ignore[attr-defined]
        self._schedule = next((c for c in callbacks if isinstance(c, LearningRateSchedule)), None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the schedule end where the run does; before the schedule looks for its end."""
        flops: Any = getattr(pl_module, "flops_per_token", None)
        self._flops_per_token = float(flops() if callable(flops) else flops or 0.0) or None
        datamodule = getattr(trainer, "datamodule", None)
        known = self._counters.tokens_per_batch is not None or isinstance(datamodule, TokenAccounting)
        if self._limits() and not known:  # the limits refuse what they cannot know
            raise ConfigError(
                "ChinchillaBudget does not know how many tokens an update uses; set budget.tokens_per_batch, or use a "
                "data module with tokens_per_update."
            )
        self._steer(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run is heading for; stop one that was over when it was saved."""
        self._began = (self._counters.seconds, self._counters.tokens_read)
        if self._seconds(trainer):
            self.agreement = Agreement.of(trainer)
            self.agreement.ask(_TIME, lambda: int(trainer.is_global_zero and self._time_is_up(trainer)))
            self.agreement.ask(_END, lambda: self._proposed_end(trainer) if trainer.is_global_zero else 0)
        both = ", ".join(f"{units.count(n)} {key.replace('_', '-')}" for key, n in self._parameters.items())
        to = name_limits(self._limits(), self._seconds(trainer), max_cost=self.budget.max_cost)
        rank_zero_info(f"Budget: parameters {both}; the run ends at {to}.")
        self._end_of_run.begin(trainer)
        if trainer.global_step > 0:  # counts are restored: the same on every rank
            self.reason = self._reached(time_is_up=self._time_is_up(trainer), trainer=trainer)
            if self.reason is not None:
                self._end_of_run.stop(trainer)

    # ---------------------------------------------------------------- limits

    @property
    def parameters(self) -> int:
        """N, as it is counted here."""
        return self._parameters[self.count]

    def _limits(self) -> dict[str, float]:
        """Tokens that count at which each limit is reached; FLOPs that were taken back shorten theirs."""
        limits = self.budget.tokens(parameters=self.parameters, flops_per_token=self._flops_per_token)
        if "max_flops" in limits and self._flops_per_token:
            taken_back = self._counters.flops / self._flops_per_token - self._counters.tokens
            limits["max_flops"] = max(1.0, limits["max_flops"] - max(0.0, taken_back))
        if self._end:
            limits["the decay's end"] = float(self._end)
        return limits

    def _seconds(self, trainer: Trainer) -> dict[str, float]:
        return self.budget.seconds(devices=trainer.world_size)

    def _steer(self, trainer: Trainer) -> None:
        """Tell the schedule where it ends."""
        if self._schedule is None:
            return
        limits = self._limits()
        self._tell_update_size(trainer)
        datamodule = getattr(trainer, "datamodule", None)
        if limits and trainer.max_steps != -1 and isinstance(datamodule, TokenAccounting):
            limits["trainer.max_steps"] = float(trainer.max_steps * datamodule.tokens_per_update)
        if limits:
            self._schedule.end_at(math.ceil(min(limits.values())))
        elif isinstance(self._schedule, WarmupStableDecay):
            if self._schedule.horizon.warmup_fraction is not None:
                raise ConfigError(
                    "A budget of time does not know the run's length beforehand, so schedule.warmup_fraction="
                    f"{self._schedule.horizon.warmup_fraction} has no meaning; set schedule.warmup_steps."
                )
            self._schedule.end_at(_ENDLESS)

    def _tell_update_size(self, trainer: Trainer) -> None:
        """The schedule counts tokens too, and no data module tells it."""
        per_batch = self._counters.tokens_per_batch
        if self._schedule is not None and isinstance(per_batch, int):
            self._schedule.update_uses(per_batch * data_parallel_size(trainer) * full_accumulation(trainer))

    def _time_is_up(self, trainer: Trainer) -> bool:
        limits = self._seconds(trainer).values()
        return bool(limits) and self._counters.seconds >= min(limits)

    def _proposed_end(self, trainer: Trainer) -> int:
        """Tokens at which to end when a decay has to begin now; 0 while there is time."""
        schedule, done = self._schedule, self._counters.tokens
        if self._end or self._limits() or not isinstance(schedule, WarmupStableDecay) or done <= 0:
            return self._end
        stable = 1.0 - schedule.decay_fraction
        projected = done + self._tokens_left_in_time(trainer)
        return math.floor(max(done / max(stable, 1e-9), done + 1)) if done >= stable * projected else 0

    def _tokens_left_in_time(self, trainer: Trainer) -> float:
        seconds, read = (
            self._counters.seconds - self._began[0],
            self._counters.tokens_read - self._began[1],
        )
        left = min(self._seconds(trainer).values()) - self._counters.seconds
        return max(0.0, left) * read / seconds if seconds > 0 else math.inf

    # ---------------------------------------------------------------- an update

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop where a limit is reached; log how far that is."""
        if _compat.accumulates(trainer):
            return
        if self._counters.tokens_read == 0 and self._limits():
            raise ConfigError(
                "ChinchillaBudget does not know how many tokens an update uses; set budget.tokens_per_batch, or use a "
                "data module with tokens_per_update."
            )
        time_is_up = False
        if self.agreement is not None:
            step = loops.batches_ready(trainer)
            time_is_up = bool(self.agreement.at_update(_TIME, step=step))
            end = self.agreement.at_update(_END, step=step)
            if end and not self._end:
                self._end = end
        self._steer(trainer)
        reached = self._reached(time_is_up=time_is_up, trainer=trainer)
        if reached is not None and self.reason is None:
            settle(trainer)  # a spike may be taken back yet, and the run then goes on
            reached = self._reached(time_is_up=time_is_up, trainer=trainer)
            if reached is not None:
                self.reason = reached
                self._end_of_run.stop(trainer)
        if _compat.should_log(trainer) or self.reason is not None:
            _compat.log(trainer, self._figures(trainer))

    def _reached(self, *, time_is_up: bool, trainer: Trainer) -> str | None:
        for name, limit in self._limits().items():
            if self._counters.tokens >= limit:
                return f"budget.{name} is reached with {units.count(self._counters.tokens)} tokens"
        if time_is_up:
            limits = self._seconds(trainer)
            name = min(limits, key=lambda key: limits[key])
            return f"budget.{name} is reached after {units.duration(self._counters.seconds)}"
        return None

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        counters, tokens, seconds = self._counters, self._limits(), self._seconds(trainer)
        shares = [counters.tokens / limit for limit in tokens.values()]
        shares += [counters.seconds / limit for limit in seconds.values()]
        figures = {
            "budget/fraction": min(1.0, max(shares, default=0.0)),
            "budget/tokens_per_parameter": counters.tokens / self.parameters,
        }
        spent = counters.seconds - self._began[0]
        rate = (counters.tokens_read - self._began[1]) / spent if spent > 0 else 0.0
        left = [(min(tokens.values()) - counters.tokens) / rate] if tokens and rate > 0 else []
        left += [limit - counters.seconds for limit in seconds.values()]
        if left:
            figures["budget/hours_left"] = max(0.0, min(left)) / 3600.0
        price = self.budget.price_per_device_hour
        if price is not None:
            figures["budget/cost"] = price * counters.device_seconds / 3600.0
            if left:
                figures["budget/cost_left"] = price * max(0.0, min(left)) * trainer.world_size / 3600.0
        return figures

    # ---------------------------------------------------------------- the end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up; save, if nobody else saves the end."""
        self.agreement = None
        self.summary = self._sum_up(trainer)
        self._end_of_run.save(trainer, reason=self.reason)
        self._end_of_run.close(trainer)
        if trainer.is_global_zero and not _compat.is_debugging(trainer):
            text = describe(self.summary)
            print(text, flush=True)
            Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
            (Path(trainer.default_root_dir) / "budget.json").write_text(json.dumps(self.summary, indent=2) + "\n")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    lines = "\n".join("    " + line for line in text.splitlines())
                    logger.experiment.add_text("budget", lines, global_step=trainer.global_step)

    def _sum_up(self, trainer: Trainer) -> dict[str, Any]:
        counters, logged = self._counters, trainer.callback_metrics
        is_language_model = self._flops_per_token is not None or isinstance(
            getattr(trainer, "datamodule", None), TokenAccounting
        )
        names = _LOSSES if self.loss is None else (self.loss,)
        name, loss = next(
            ((name, float(logged[name])) for name in names if name in logged and math.isfinite(float(logged[name]))),
            (None, None),
        )
        tokens = max(1.0, counters.tokens)
        return {
            "reason": self.reason or "the trainer's own limit is reached",
            "parameters": dict(self._parameters),
            "counted": self.count,
            "tokens": counters.tokens,
            "tokens_read": counters.tokens_read,
            "updates": counters.updates,
            "tokens_per_parameter": counters.tokens / self.parameters,
            "flops": counters.flops or FLOPS_PER_PARAMETER * self.parameters * counters.tokens_read,
            "hours": counters.seconds / 3600.0,
            "device_hours": counters.device_seconds / 3600.0,
            "cost": None
            if self.budget.price_per_device_hour is None
            else self.budget.price_per_device_hour * counters.device_seconds / 3600.0,
            "loss": loss,
            "loss_name": name,
            "predicted": {law.name: law.loss(parameters=self.parameters, tokens=tokens) for law in LAWS.values()}
            if is_language_model
            else {},
        }

    def state_dict(self) -> dict[str, Any]:
        """Where a decay that has begun ends."""
        return {"end": self._end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on."""
        self._end = int(state_dict["end"])
