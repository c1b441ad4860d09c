"""What the precision of a trainer means where parameters are sharded: the types in which they are gathered."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import MasterWeightPrecision

GivenPrecision = str | MasterWeightPrecision | None


def given(precision: GivenPrecision) -> MasterWeightPrecision | None:
    """The plugin that a strategy's argument names.

    Raises:
        ConfigError: It is unknown.
    """
    if precision is None or isinstance(precision, MasterWeightPrecision):
        return precision
    if precision in ("bf16", "fp16", "fp32"):
        return MasterWeightPrecision(precision)  # type: ignore[arg-type]
    raise ConfigError(
        f"strategy.precision={precision!r} must be bf16, fp16, fp32 or a MasterWeightPrecision; leave it out where "
        "trainer.precision says it."
    )


def adapt(plugin: Precision, *, own: MasterWeightPrecision | None) -> Precision:
    """The plugin that does under sharding what a Trainer's plugin does without.

    Args:
        plugin: Of the trainer: from its flag, or given to it.
        own: That the strategy was given.

    Raises:
        ConfigError: There is none, or the precision is set in two places.
    """
    word = getattr(plugin, "precision", type(plugin).__name__)
    if own is not None:
        # The flag's default cannot be told from a flag of the same value.
        if plugin is own or type(plugin) is Precision:
            return own
        raise ConfigError(f"strategy.precision={own.kind} and trainer.precision={word} are both set; remove one.")
    if isinstance(plugin, MasterWeightPrecision):
        return plugin
    if isinstance(plugin, MixedPrecision):
        if plugin.precision == "bf16-mixed":
            return MasterWeightPrecision("bf16")
        _check_scaler(plugin.scaler)
        return MasterWeightPrecision("fp16")
    if type(plugin) is Precision:
        return MasterWeightPrecision("fp32")
    if type(plugin) in (DoublePrecision, HalfPrecision):
        return plugin
    raise ConfigError(
        f"trainer.precision={word!r} does not work with this strategy; use bf16-mixed, 16-mixed, bf16-true, 32-true or "
        "64-true, or a lit_pretrain.plugins.MasterWeightPrecision."
    )


def _check_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Refuse settings of torch's scaler, which would be lost; Lightning's flag makes one without any."""
    if scaler is None:
        return
    growth = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    if growth != (2.0, 0.5, 2000) or scaler.get_scale() not in (1.0, 2.0**16):  # 1: there is no device for it
        raise ConfigError(
            "trainer.plugins holds a GradScaler with settings of its own, which does not work with this strategy; give "
            "MasterWeightPrecision('fp16', scaler=DynamicLossScaler(...)) instead of MixedPrecision."
        )


def policies(plugin: Precision) -> dict[str, Any]:
    """What sharding has to know of a plugin from :func:`adapt`: settings of a ``LayoutSettings``."""
    if not isinstance(plugin, MasterWeightPrecision) or plugin.dtype is None:
        return {}
    reduced = torch.float32 if plugin.reduce_in == "fp32" else plugin.dtype
    return {
        "policy": MixedPrecisionPolicy(param_dtype=plugin.dtype, reduce_dtype=reduced),
        # The root's inputs are the batch: targets of a regression must keep their digits.
        "root_policy": MixedPrecisionPolicy(param_dtype=plugin.dtype, reduce_dtype=reduced, cast_forward_inputs=False),
        "kept": plugin.keep_fp32,
        "kept_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
    }
