"""Gradient clipping by the global norm, and what happens to updates whose gradients are not finite."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks.order import Order
from lit_pretrain.distributed.grad_norm import clip_to_norm, global_norm
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import GradientNorm

# Sharded gradients that are plain tensors: a norm over them would be a rank's own, and clipping would differ by rank.
_SHARDING_STRATEGIES = ("FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")
_SHARE_UPDATES = 100


class GradientClipping(Callback):
    """Scales gradients down to a global L2 norm of ``max_norm``, and guards the weights from non-finite ones.

    Runs in ``on_before_optimizer_step``: after the last backward of an accumulation, after DDP's all-reduce and after
    unscaling (fused optimizers, which Lightning leaves scaled, are unscaled here), before the optimizer. The norm is
    the strategy's own where it has one, else that of the gradients at hand.

    Logs ``train/grad_norm`` (before), ``train/grad_norm_clipped`` (after), ``train/clip_share`` (share of clipped
    updates, running over about the last 100) and under ``skip`` ``train/skipped_updates``.

    Non-finite gradients. With a gradient scaler (fp16) the scaler drops the update and lowers its scale: this callback
    then only keeps its hands off. Without one:

    - ``error`` stops the run and names the update and a parameter. On CUDA the norm is read when it has arrived,
      usually one update late, and in any case before a checkpoint, a validation and the end: a poisoned update may
      reach the weights in memory, never a file or a figure.
    - ``skip`` drops the update by taking the gradients away: weights and moments stay as they are. All ranks agree,
      since a NaN on one of them has spread through the all-reduce before the norm is taken. It has to know before the
      optimizer runs, so on CUDA it waits for the backward pass once per update.
    - ``ignore`` lets them through unscaled and never waits.

    Args:
        max_norm: Above 0; ``inf`` measures without clipping.
        non_finite: ``error``, ``skip`` or ``ignore``.
        max_consecutive_skips: So many skips in a row stop the run.

    Attributes:
        norm: Of the newest update, before clipping, a 0-d tensor on its device; None before the first.

    Raises:
        ConfigError: Before the first step, if ``Trainer(gradient_clip_val=...)`` clips too, or if the strategy shards
            gradients without a norm of its own.
        FloatingPointError: On a non-finite gradient under ``error``, or too many skips.
    """

    order: ClassVar[int] = Order.NON_FINITE

    def __init__(
        self,
        max_norm: float = 1.0,
        *,
        non_finite: Literal["error", "skip", "ignore"] = "error",
        max_consecutive_skips: int = 10,
    ) -> None:
        if not max_norm > 0:
            raise ConfigError(
                f"callbacks.clipping.max_norm={max_norm} must be above 0; use inf to measure without clipping."
            )
        if non_finite not in ("error", "skip", "ignore"):
            raise ConfigError(
                f"callbacks.clipping.non_finite={non_finite!r} is unknown; use one of error, skip, ignore."
            )
        if max_consecutive_skips < 1:
            raise ConfigError(f"callbacks.clipping.max_consecutive_skips={max_consecutive_skips} must be at least 1.")
        self.max_norm = float(max_norm)
        self.non_finite = non_finite
        self.max_consecutive_skips = max_consecutive_skips
        self.skipped_updates = 0
        self.norm: Tensor | None = None
        self._consecutive = 0
        self._updates = 0
        self._share: Tensor | float = 0.0
        self._in_flight: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second owner of clipping and strategies whose gradients are out of reach."""
        if stage != "fit":
            return
        if trainer.gradient_clip_val:
            raise ConfigError(
                f"callbacks.GradientClipping(max_norm={self.max_norm}) and trainer.gradient_clip_val="
                f"{trainer.gradient_clip_val} would both clip; remove one of them."
            )
        strategy = trainer.strategy
        names = {c.__name__ for c in type(strategy).__mro__}
        if not isinstance(strategy, GradientNorm) and names & set(_SHARDING_STRATEGIES):
            raise ConfigError(
                f"GradientClipping cannot see the whole gradient under strategy={type(strategy).__name__}, which "
                "shards it; use trainer.gradient_clip_val, or a strategy with a global_grad_norm method."
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure, judge, clip."""
        scaler = _compat.grad_scaler(trainer)
        if scaler is not None:
            _compat.unscale_if_left_scaled(scaler, optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        if isinstance(trainer.strategy, GradientNorm):
            norm: Tensor = trainer.strategy.global_grad_norm(parameters)
        else:
            norm = global_norm([p.grad for p in parameters])
        self.norm = norm
        judged = scaler is None and self.non_finite != "ignore"
        if judged and not self._let_through(norm, parameters, trainer, pl_module):
            self._log(trainer, norm=None)
            return
        self._clip(norm, parameters)
        self._log(trainer, norm=norm)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No validation on weights that a non-finite gradient reached."""
        self._read_in_flight(pl_module, wait=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """No checkpoint of weights that a non-finite gradient reached; Lightning calls this before it writes."""
        self._read_in_flight(pl_module, wait=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No success with weights that a non-finite gradient reached."""
        self._read_in_flight(pl_module, wait=True)

    def state_dict(self) -> dict[str, Any]:
        """Counts, so that a resumed run goes on with them."""
        return {
            "skipped_updates": self.skipped_updates,
            "consecutive": self._consecutive,
            "updates": self._updates,
            "share": float(self._share),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the counts."""
        self.skipped_updates = state_dict["skipped_updates"]
        self._consecutive = state_dict["consecutive"]
        self._updates = state_dict["updates"]
        self._share = state_dict["share"]

    def _reads_late(self, norm: Tensor) -> bool:
        """Whether reading the norm now would wait for the device."""
        return norm.is_cuda

    def _let_through(
        self, norm: Tensor, parameters: Sequence[nn.Parameter], trainer: Trainer, pl_module: LightningModule
    ) -> bool:
        """Whether the optimizer may use these gradients; raises where the run has to stop."""
        if self.non_finite == "error" and self._reads_late(norm):
            self._send(trainer.global_step, norm)
            self._read_in_flight(pl_module, wait=False)
            return True
        if torch.isfinite(norm).item():  # on CUDA the one wait per update that `skip` costs
            self._consecutive = 0
            return True
        culprit = _first_non_finite(pl_module, [(p, p.grad) for p in parameters if p.grad is not None])
        if self.non_finite == "error":
            raise _stop(trainer.global_step, f"the gradient of {culprit} is not finite")
        for p in parameters:
            p.grad = None
        self.skipped_updates += 1
        self._consecutive += 1
        if self._consecutive >= self.max_consecutive_skips:
            raise _stop(
                trainer.global_step, f"{self._consecutive} updates in a row were skipped, this one for {culprit}"
            )
        warnings.warn(
            f"Skipped update {trainer.global_step}: the gradient of {culprit} is not finite "
            f"({self.skipped_updates} skipped so far).",
            stacklevel=2,
        )
        return False

    def _clip(self, norm: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self._updates += 1
        weight = 1.0 / min(self._updates, _SHARE_UPDATES)
        if self._reads_late(norm):
            # Decided on the device. A non-finite norm must not spread to healthy gradients, so it clips nothing.
            finite = torch.isfinite(norm)
            if not isinstance(self._share, Tensor):
                self._share = torch.tensor(self._share, device=norm.device)
            self._share.lerp_(((norm > self.max_norm) & finite).to(self._share.dtype), weight)
            clip_to_norm(parameters, self.max_norm, torch.where(finite, norm, 0.0))
            return
        clipped = bool(torch.isfinite(norm)) and norm.item() > self.max_norm
        self._share += (clipped - self._share) * weight
        if clipped:
            clip_to_norm(parameters, self.max_norm, norm)

    def _log(self, trainer: Trainer, *, norm: Tensor | None) -> None:
        if not _compat.should_log(trainer):
            return
        metrics: dict[str, float] = {"train/clip_share": float(self._share)}
        if self.non_finite == "skip":
            metrics["train/skipped_updates"] = float(self.skipped_updates)
        if norm is not None and torch.isfinite(norm).item():  # the loggers read the loss here too
            value = norm.item()
            metrics |= {"train/grad_norm": value, "train/grad_norm_clipped": min(value, self.max_norm)}
        _compat.log(trainer, metrics)

    def _send(self, step: int, norm: Tensor) -> None:
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host = torch.empty((), dtype=norm.dtype, pin_memory=norm.is_cuda)
        host.copy_(norm, non_blocking=True)
        arrived.record()
        self._in_flight.append((step, host, arrived))

    def _read_in_flight(self, pl_module: LightningModule, *, wait: bool) -> None:
        while self._in_flight and (wait or self._in_flight[0][2].query()):  # type: ignore[no-untyped-call]
            step, norm, arrived = self._in_flight.popleft()
            arrived.synchronize()
            if not torch.isfinite(norm):
                self._in_flight.clear()
                # The gradients are gone; what they touched was not clipped away, and shows.
                culprit = _first_non_finite(pl_module, [(p, p) for p in pl_module.parameters()])
                raise _stop(step, f"the gradient of {culprit} is not finite")


def _first_non_finite(pl_module: LightningModule, values: Sequence[tuple[nn.Parameter, Tensor]]) -> str:
    names = {id(p): name for name, p in pl_module.named_parameters()}
    for parameter, value in values:
        if not torch.isfinite(value).all():
            return names.get(id(parameter), "a parameter outside the module")
    return "another rank's shard"


def _stop(step: int, what: str) -> FloatingPointError:
    return FloatingPointError(
        f"Update {step}: {what}. Look at the batch and the learning rate of that update; "
        "callbacks.clipping.non_finite=skip drops such updates instead."
    )
