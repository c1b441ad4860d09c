"""An update that is not made: gradients are taken away before the optimizer runs, and Lightning forgets it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_pretrain.callbacks import _random
from lit_pretrain.callbacks._compat import rewind
from lit_pretrain.callbacks._compat.rewind import LoggedValues, WeightClock
from lit_pretrain.callbacks.exact_resume import ExactResume
from lit_pretrain.errors import ConfigError


class UpdateDrop:
    """By selection, never by multiplication with zero: an optimizer passes over a parameter without a gradient.

    After it, buffers, random states, schedulers and loss scale are those of the window's start, as if its data had not
    been there. No validation follows it.

    Args:
        trainer: In ``on_train_start``.

    Attributes:
        random: This rank's random state at the window's start.

    Raises:
        ConfigError: Several optimizers, of which only one could be held back, or one that makes an update of several
            losses.
    """

    def __init__(self, trainer: Trainer) -> None:
        if len(trainer.optimizers) > 1:
            raise ConfigError(
                f"LossSpikeRollback(mode='skip') drops the update of one optimizer, and "
                f"{type(trainer.lightning_module).__name__}.configure_optimizers returned {len(trainer.optimizers)}; "
                "use mode='rollback', which takes all of them back."
            )
        if any(isinstance(getattr(o, "optimizer", o), torch.optim.LBFGS) for o in trainer.optimizers):
            raise ConfigError(
                "LossSpikeRollback(mode='skip') judges the loss of an update before it is made, and LBFGS evaluates "
                "several on the way; use mode='rollback'."
            )
        self._clock: WeightClock | None = None
        self._logged: LoggedValues | None = None
        self.random: _random.State = {}
        self._schedulers: list[tuple[dict[str, Any], list[Any]]] = []
        self._precision: dict[str, Any] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._is_dropped = False

    def open_window(self, trainer: Trainer) -> None:
        """Note what a window's start looks like."""
        self._clock, self._logged = rewind.read_clock(trainer), rewind.logged_values(trainer)
        self.random = _random.capture()
        self._schedulers = [
            (deepcopy(c.scheduler.state_dict()), [deepcopy(g["lr"]) for g in c.scheduler.optimizer.param_groups])
            for c in trainer.lr_scheduler_configs
        ]
        self._precision = deepcopy(trainer.precision_plugin.state_dict())
        self._buffers = [(b, b.detach().clone()) for b in trainer.lightning_module.buffers()]
        self._is_dropped = False

    def drop(self, optimizer: Optimizer) -> None:
        """In ``on_before_optimizer_step``."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._is_dropped = True

    def drop_again(self, optimizer: Optimizer) -> None:
        """In ``on_before_optimizer_step``: what holds for the step before holds for one that follows it."""
        if self._is_dropped:
            self.drop(optimizer)

    @torch.no_grad()
    def take_back(self, trainer: Trainer) -> int | None:
        """At the end of the window's last batch: nothing has happened, if it was dropped.

        Returns:
            The step under which the next update is logged; None when nothing was dropped.
        """
        if not self._is_dropped or self._clock is None or self._logged is None:
            return None
        self._is_dropped = False
        rewind.set_clock(trainer, self._clock)
        rewind.restore_logged_values(trainer, self._logged)
        for config, (state, rates) in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            config.scheduler.load_state_dict(state)
            for group, rate in zip(config.scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if self._precision:
            trainer.precision_plugin.load_state_dict(self._precision)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        _random.restore(self.random)
        rewind.skip_next_validation(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ExactResume):
                callback.rewind(windows=self._clock.windows)
        return self._clock.windows
