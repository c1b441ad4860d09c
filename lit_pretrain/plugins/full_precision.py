"""Chosen parts of a module that compute in float32 while the rest does so in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lit_pretrain.distributed.tensor_parallel import matches
from lit_pretrain.errors import ConfigError

_MARK = "_lit_pretrain_full_precision"
_FORMER = "_lit_pretrain_former_class"


def full_precision_modules(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Submodules that fit a pattern, by name.

    Args:
        root: Names are relative to it.
        patterns: ``*`` stands for one part of a name.
    """
    return {name: m for name, m in root.named_modules() if name and any(matches(name, p) for p in patterns)}


def run_in_full_precision(root: nn.Module, patterns: Sequence[str], *, device_type: str) -> frozenset[nn.Parameter]:
    """Let what fits the patterns compute in float32 under autocast: inputs are widened, operations not narrowed.

    A pattern names modules, or a method of modules (``model.loss``). The classes of what it names are replaced by
    subclasses, until :func:`restore`; without autocast they do what they did. Calling it again changes nothing.

    Args:
        root: Names are relative to it.
        patterns: ``*`` stands for one part of a name.
        device_type: Where it computes.

    Returns:
        The parameters of the modules named, which stay in float32.

    Raises:
        ConfigError: A pattern fits nothing, or something that has no forward of its own.
    """
    kept: set[nn.Parameter] = set()
    for pattern in patterns:
        found = full_precision_modules(root, [pattern])
        if found:
            for name, module in found.items():
                if isinstance(module, nn.ModuleList | nn.ModuleDict):
                    raise ConfigError(
                        f"precision.keep_fp32 has {pattern!r}, but {name} is a container that is never called; name "
                        f"what is in it ({pattern}.*)."
                    )
                _widen(module, "forward", device_type)
                kept.update(module.parameters())
            continue
        owner, _, method = pattern.rpartition(".")
        owners = [root] if not owner else list(full_precision_modules(root, [owner]).values())
        owners = [m for m in owners if callable(getattr(type(m), method, None))]
        if not owners:
            raise ConfigError(
                f"precision.keep_fp32 has {pattern!r}, which names no part and no method of {type(root).__name__}; "
                "names are those of named_modules(), with * for one part."
            )
        for module in owners:
            _widen(module, method, device_type)
    return frozenset(kept)


def _widen(module: nn.Module, method: str, device_type: str) -> None:
    cls = type(module)
    inner: Callable[..., Any] = getattr(cls, method)
    if getattr(inner, _MARK, False):
        return

    @functools.wraps(inner)
    def widened(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):
            return inner(self, *args, **kwargs)
        args, kwargs = tree_map(_wide, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return inner(self, *args, **kwargs)

    setattr(widened, _MARK, True)
    # A class and no attribute of the object: copies of the object then call the method on themselves.
    module.__class__ = type(cls.__name__, (cls,), {method: widened, "__module__": cls.__module__, _FORMER: cls})


def restore(root: nn.Module) -> None:
    """Give modules their own classes back: they can be pickled, and another precision finds them as they were."""
    for module in root.modules():
        while _FORMER in vars(type(module)):
            module.__class__ = vars(type(module))[_FORMER]


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_narrow else value
