"""What ranks compute together. Nothing is loaded before it is asked for: the command line reads checkpoints' facts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_pretrain.distributed.grad_norm import global_norm

__all__ = ["global_norm"]

_HOMES = {"global_norm": "lit_pretrain.distributed.grad_norm"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
