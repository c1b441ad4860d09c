"""What the precision flag means where parameters are sharded."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

from lit_pretrain.errors import ConfigError


class BFloat16Mixed(Precision):
    """``bf16-mixed``: FP32 weights and optimizer states, gathered as bfloat16; gradients are reduced in FP32.

    Autocast still chooses the type of each operation, as under Lightning's own plugin of that name.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """

    precision: Any = "bf16-mixed"

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast; its cache of weights would outlive their gathering."""
        with torch.autocast(self.device_type, dtype=torch.bfloat16, cache_enabled=False):
            yield


@dataclass(frozen=True, kw_only=True)
class Precisions:
    """Types of parameters and reduced gradients in units and in the rest; None leaves them as they are."""

    units: MixedPrecisionPolicy | None = None
    rest: MixedPrecisionPolicy | None = None


def adapt(plugin: Precision) -> Precision:
    """The plugin that does under sharding what a Trainer's plugin does without.

    Raises:
        ConfigError: There is none yet.
    """
    if isinstance(plugin, MixedPrecision):
        if plugin.precision == "bf16-mixed":
            return BFloat16Mixed(plugin.device)
    elif type(plugin) in (Precision, DoublePrecision, HalfPrecision) or isinstance(plugin, BFloat16Mixed):
        return plugin
    raise ConfigError(
        f"trainer.precision={getattr(plugin, 'precision', type(plugin).__name__)!r} does not work with this strategy; "
        "use bf16-mixed, bf16-true, 32-true or 64-true."
    )


def policies(plugin: Precision) -> Precisions:
    """What sharding has to know of a plugin."""
    if not isinstance(plugin, BFloat16Mixed):
        return Precisions()
    # The root's inputs are the batch: targets of a regression must keep their digits.
    return Precisions(
        units=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        rest=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False),
    )
