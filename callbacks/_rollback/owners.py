"""Who else among the callbacks decides, or waits for, what a rollback decides."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from lit_pretrain.callbacks._compat.rewind import saves_every
from lit_pretrain.callbacks.clipping import GradientClipping
from lit_pretrain.callbacks.non_finite import NonFiniteGuard
from lit_pretrain.callbacks.run_checkpoint import RunCheckpoint
from lit_pretrain.errors import ConfigError

_OUT_OF_REACH = ("FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")  # keep states where nobody else finds them


def check_owners(trainer: Trainer, rollback: Callback, *, mode: str) -> None:
    """Refuse a second owner of the same decision, and strategies whose states cannot be restored.

    Raises:
        ConfigError: Naming both.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(type(c) is type(rollback) and c is not rollback for c in callbacks):
        raise ConfigError("callbacks hold two LossSpikeRollback, and each would go back; keep one of them.")
    clipping = next((c for c in callbacks if isinstance(c, GradientClipping)), None)
    if clipping is not None and mode != "warn" and clipping.non_finite != "ignore":
        raise ConfigError(
            f"LossSpikeRollback(mode={mode!r}) takes care of updates that are not finite, and "
            f"GradientClipping(non_finite={clipping.non_finite!r}) would too; give it non_finite='ignore' "
            "(callbacks.clipping.non_finite=ignore)."
        )
    guard = next((c for c in callbacks if isinstance(c, NonFiniteGuard)), None)
    if guard is not None and mode != "warn" and guard.action == "stop":
        raise ConfigError(
            f"NonFiniteGuard(action='stop') would end the run at a value that LossSpikeRollback(mode={mode!r}) takes "
            "back; give it action='report' (callbacks.non_finite.action=report)."
        )
    names = {c.__name__ for c in type(trainer.strategy).__mro__} & set(_OUT_OF_REACH)
    if names and mode == "rollback":
        raise ConfigError(
            f"LossSpikeRollback cannot reach the states of strategy={names.pop()}; use ddp or a strategy of "
            "lit-pretrain, or LossSpikeRollback(mode='skip') (callbacks.rollback.mode=skip)."
        )
    if mode != "warn" and any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
        raise ConfigError(
            "StochasticWeightAveraging keeps an average and a schedule that LossSpikeRollback cannot take back; use "
            "Lightning's WeightAveraging, or LossSpikeRollback(mode='warn')."
        )


def save_is_due(trainer: Trainer) -> bool:
    """Whether a callback saves at this update by its count of steps."""
    for callback in trainer.checkpoint_callbacks:
        every = 0
        if isinstance(callback, RunCheckpoint):
            every = callback.every_n_steps or 0
        elif isinstance(callback, ModelCheckpoint):
            every = saves_every(callback)
        if every and trainer.global_step % every == 0:
            return True
    return False
