"""The private names of Lightning and torch that callbacks lean on, each with the reason and when it can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lit_pretrain.callbacks._compat.rows import log as log


def should_log(trainer: Trainer) -> bool:
    """Whether what is logged in this training batch reaches the loggers, or is the last word of the run.

    Lightning decides by ``_batches_that_stepped``, which no public property shows; ``Trainer.global_step`` differs
    from it under manual optimization. Can go when the trainer offers a public answer (seen in lightning 2.6).
    """
    return bool(trainer._logger_connector.should_update_logs or is_debugging(trainer) or ends_run(trainer))


def is_debugging(trainer: Trainer) -> bool:
    """Whether ``fast_dev_run`` is on; Lightning sets the attribute outside the class, where type checkers miss it."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def ends_run(trainer: Trainer) -> bool:
    """Whether the update in progress may be the last of the epoch or of the run."""
    return bool(trainer.is_last_batch or (trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps))


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch in progress only adds gradients. ``_should_accumulate`` has no public counterpart (2.6)."""
    return bool(trainer.fit_loop._should_accumulate())


def grad_scaler(trainer: Trainer) -> Any | None:
    """The loss scaler of the precision plugin, or None: it then owns what happens to non-finite gradients."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and getattr(scaler, "is_enabled", lambda: True)() else None


def loss_scale(trainer: Trainer) -> float:
    """What the loss is multiplied with before the backward pass; 1 where there is no scaler.

    Our plugin says it of itself; of Lightning's, torch's scaler does, and waits for the device.
    """
    plugin = trainer.precision_plugin
    if hasattr(plugin, "loss_scale"):
        return float(plugin.loss_scale)
    scaler = grad_scaler(trainer)
    return 1.0 if scaler is None else float(scaler.get_scale())


def unscale_if_left_scaled(scaler: Any, optimizer: Optimizer) -> None:
    """Bring gradients to true units where Lightning leaves that to the optimizer's own step.

    Lightning unscales before ``on_before_optimizer_step`` except for optimizers that set
    ``_step_supports_amp_scaling`` (fused ones). Unscaling those here is safe: torch then hands the kernel
    ``grad_scale=None`` and it does not divide a second time. Can go when Lightning unscales for fused optimizers too.
    """
    unscale = getattr(scaler, "unscale_", None)  # our own plugin has unscaled already, for every optimizer
    if unscale is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        unscale(optimizer)


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Whether the optimizer step that just ran changed nothing. Call it from a step post hook.

    Two ways to skip: no parameter has a gradient (a callback dropped the update), or a fused optimizer was handed a
    non-zero ``found_inf`` by ``torch.amp.GradScaler`` (an unfused one is not called at all, so its hook stays silent).
    Reading ``found_inf`` waits for the device once per update, for fused optimizers under fp16 on CUDA only; torch
    does the same wait itself for unfused ones.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, torch.Tensor) and found_inf.item():
        return True
    return not any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def versions(trainer: Trainer) -> list[int]:
    """How often the first parameter of each group was changed in place: an optimizer that has begun changes it first.

    ``Tensor._version`` is documented by torch's autograd notes, with the underscore.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [group["params"][0]._version for group in groups if group["params"]]


def silence_sigterm_broadcast(trainer: Trainer) -> None:
    """Stop Lightning from synchronising all ranks at every microbatch to hear of a SIGTERM on rank 0.

    ``_broadcast_sigterm_tensor`` is called by the loop itself; a callback that agrees on signals makes it needless.
    Can go when the broadcast is optional upstream (lightning 2.6 has no switch).
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]


def restore_sigterm_broadcast(trainer: Trainer) -> None:
    """Take ``silence_sigterm_broadcast`` back."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def _do_nothing() -> None:
    pass


def writes_folders(trainer: Trainer) -> bool:
    """Whether the checkpoint plugin makes a folder of a checkpoint."""
    return bool(getattr(trainer.strategy.checkpoint_io, "writes_folders", False))


def checkpoint_suffix(trainer: Trainer) -> str:
    """What the names of checkpoints end with."""
    return "" if writes_folders(trainer) else ".ckpt"


def begin_saving(trainer: Trainer) -> None:
    """Tell a checkpoint plugin that a training begins, where it wants to know."""
    begin = getattr(trainer.strategy.checkpoint_io, "begin", None)
    if begin is not None:
        begin()


def after_save(trainer: Trainer, work: Callable[[], object]) -> None:
    """Do something that relies on the last checkpoint: when it is on the disk, and not at all if it fails."""
    later = getattr(trainer.strategy.checkpoint_io, "after_save", None)
    if later is None:
        work()
    else:
        later(work)


def save_has_failed(trainer: Trainer) -> bool:
    """Whether a save in the background failed and nobody was told; of the rank that writes."""
    return bool(getattr(trainer.strategy.checkpoint_io, "failed", False))


def wait_for_save(trainer: Trainer) -> None:
    """Return when the last checkpoint is on the disk; an error of a save in the background is raised here."""
    wait = getattr(trainer.strategy.checkpoint_io, "wait", None)
    if wait is not None:
        wait()
