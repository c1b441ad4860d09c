"""A checkpoint in memory: named tensors, and everything else as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_pretrain.distributed.checkpoint.codec import encode
from lit_pretrain.distributed.checkpoint.manifest import CheckpointError, CheckpointFacts

EXTRA = "extra."
"""Prefix of the names of tensors that stood in the tree."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A checkpoint ready to be written: tensors by name, and everything else as JSON.

    Args:
        tensors: Every tensor once. They still are the caller's, until somebody copies them.
        tree: ``trainer.json``.
        rng: ``rng/*.json``, by rank.
        facts: For the manifest.
    """

    tensors: dict[str, Tensor]
    tree: dict[str, Any]
    rng: list[Any]
    facts: CheckpointFacts


def pack(
    *, tensors: Mapping[str, Tensor], tree: Any, rng: Sequence[Mapping[str, Any]], facts: CheckpointFacts
) -> Packed:
    """Encode a checkpoint. No tensor is copied but those in ``rng``.

    Args:
        tensors: By global name; one tensor under several names is written once.
        tree: Everything else; tensors in it are written as ``extra.<path>``.
        rng: Random states of every rank.
        facts: For the manifest.

    Raises:
        CheckpointError: The tree holds what cannot be saved.
    """
    encoded, extra = encode(tree)
    every = {**tensors, **{EXTRA + path: tensor for path, tensor in extra.items()}}
    if len(every) != len(tensors) + len(extra):
        raise CheckpointError(f"names of tensors must not begin with {EXTRA!r}, which is for those in the tree.")
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in every.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel() > 0
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if plain else name
        first = seen.setdefault(same, name)
        if first == name:
            kept[name] = tensor
        else:
            aliases[name] = first
    ranks = [
        {"rank": i, "world_size": len(rng), "state": encode(state, inline_tensors=True, root=f"rng of rank {i}")[0]}
        for i, state in enumerate(rng)
    ]
    return Packed(tensors=kept, tree={"tree": encoded, "aliases": aliases}, rng=ranks, facts=facts)
