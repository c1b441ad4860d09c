"""The private Lightning names that the strategies need, in one place. Lightning 2.6."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer


class CheckedScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, with a check before it starts any.

    Args:
        settings: Of Lightning's own.
        check: Raises where the run cannot work.
    """

    def __init__(self, *settings: Any, check: Callable[[], None]) -> None:
        super().__init__(*settings)
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check, then start the other processes and run ``function`` in all."""
        attach_module(trainer)
        self._check()
        return super().launch(function, *args, trainer=trainer, **kwargs)


class CheckedForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher by fork or spawn, with a check before it starts any process.

    Rank 0 sends no weights back to the parent: they are sharded, and sending them crashed.
    """

    def __init__(self, strategy: Any, *, check: Callable[[], None], start_method: Literal["spawn", "fork"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check, then run ``function`` in new processes."""
        attach_module(trainer)
        self._check()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        saver = trainer.checkpoint_callback
        best = getattr(saver, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def attach_module(trainer: pl.Trainer | None) -> None:
    """Let the module find its trainer while it is checked before the launch; Lightning attaches it after that."""
    module = trainer.strategy.lightning_module if trainer is not None else None
    if trainer is not None and module is not None and module._trainer is None:
        module.trainer = trainer


def init_process_group(environment: ClusterEnvironment, *, device: torch.device, timeout: timedelta) -> None:
    """Start torch's process group as the cluster environment says, unless there is one."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _init_dist_connection(environment, backend, timeout=timeout)


def reduce_over(tensor: Tensor, group: Any, operation: Any) -> Tensor:
    """Reduce in place over a group, with Lightning's names of operations."""
    return _sync_ddp_if_available(tensor, group, reduce_op=operation)


def tell_rank_zero(rank: int) -> None:
    """Tell Lightning's ``rank_zero_only`` which rank this is: it is a function with an attribute."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def forget_optimizers(strategy: Strategy) -> None:
    """Drop optimizers and schedulers of an earlier fit."""
    strategy._reset_optimizers_and_schedulers()


def move_optimizers(optimizers: list[Optimizer], device: torch.device) -> None:
    """Move optimizer states."""
    _optimizers_to_device(optimizers, device)


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def leave_inference_mode(trainer: pl.Trainer) -> None:
    """Let every evaluation loop run under ``no_grad``.

    FSDP under inference mode spoils the training steps that follow, and metrics that were reset under it could not be
    updated outside. Lightning makes an exception for its own FSDP strategy by its class only.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def _evaluation_loop(trainer: pl.Trainer) -> Any:
    loops = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    return loops[trainer.state.fn]


def evaluation_batches(trainer: pl.Trainer) -> list[int | float]:
    """This rank's batches per loader of the evaluation that begins; infinite where nobody knows."""
    loop = _evaluation_loop(trainer)
    batches: list[int | float] = list(loop.max_batches)
    # Prediction knows no other mode than one loader after the other.
    return batches if getattr(loop, "_is_sequential", True) else [math.inf]


def before_results_of_loader(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Call a function when a loader is exhausted, before what was logged of it is reduced over ranks.

    No hook of Lightning's stands there: its ``on_validation_epoch_end`` comes after the reduction.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        store = type(loop)._store_dataloader_outputs.__get__(loop)

        def finish_and_store(store: Callable[[], None] = store) -> None:
            function()
            store()

        loop._store_dataloader_outputs = finish_and_store  # type: ignore[method-assign]
