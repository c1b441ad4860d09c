"""Checkpoint folders: written whole or not at all, checked whenever they are read, no pickle trusted.

Importing this package loads no torch; ``catalog``, ``manifest`` and ``codec`` need none either.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_pretrain.distributed.checkpoint.background import BackgroundWriter
    from lit_pretrain.distributed.checkpoint.catalog import Found, complete, newest, plain, prune
    from lit_pretrain.distributed.checkpoint.codec import decode, encode
    from lit_pretrain.distributed.checkpoint.folder import (
        load_tensors,
        read_checkpoint,
        read_rng,
        read_tree,
        write_checkpoint,
    )
    from lit_pretrain.distributed.checkpoint.manifest import CheckpointError, CheckpointFacts, verify

_HOMES = {
    "BackgroundWriter": "background",
    "CheckpointError": "manifest",
    "CheckpointFacts": "manifest",
    "Found": "catalog",
    "complete": "catalog",
    "decode": "codec",
    "encode": "codec",
    "load_tensors": "folder",
    "newest": "catalog",
    "plain": "catalog",
    "prune": "catalog",
    "read_checkpoint": "folder",
    "read_rng": "folder",
    "read_tree": "folder",
    "verify": "manifest",
    "write_checkpoint": "folder",
}

__all__ = [
    "BackgroundWriter",
    "CheckpointError",
    "CheckpointFacts",
    "Found",
    "complete",
    "decode",
    "encode",
    "load_tensors",
    "newest",
    "plain",
    "prune",
    "read_checkpoint",
    "read_rng",
    "read_tree",
    "verify",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
