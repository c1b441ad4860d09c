"""Which part of a sequence each context-parallel rank holds: the zigzag order, as pure functions.

A sequence is cut into two chunks per rank, and rank r of n holds the chunks r and 2n - 1 - r, in this order. An early
chunk sees little of the sequence and a late one much; together every rank has the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs.parallel import SETTINGS, divisors, listed

SHARDED_KEYS = ("ids", "targets", "positions", "doc_ids")
"""What a batch of ours holds per token."""


def check_sequence_length(length: int, *, size: int, setting: str = "data.sequence_length") -> None:
    """Refuse a length that cannot be cut into two equal chunks per rank.

    Args:
        length: Tokens in a whole sequence.
        size: Context-parallel ranks; 1 takes any length.
        setting: What the user calls the length.

    Raises:
        ConfigError: Names the nearest legal lengths, and the legal numbers of ranks.
    """
    if size == 1 or (length > 0 and length % (2 * size) == 0):
        return
    below = length // (2 * size) * 2 * size
    lengths = [below + 2 * size] if below <= 0 else [below, below + 2 * size]
    sizes = [1, *(d for d in divisors(length // 2) if d > 1 and length % (2 * d) == 0)]
    raise ConfigError(
        f"{setting}={length} must be a multiple of 2 x {SETTINGS['cp']}={size}; use {listed(lengths)} tokens, or "
        f"{listed(sizes)} context-parallel ranks."
    )


def zigzag_chunks(rank: int, *, size: int) -> tuple[int, ...]:
    """The chunks that ``rank`` holds, ascending: ``(rank, 2 size - 1 - rank)``, or the one whole for ``size`` 1."""
    assert 0 <= rank < size, (rank, size)
    return (0,) if size == 1 else (rank, 2 * size - 1 - rank)


def zigzag_positions(length: int, *, rank: int, size: int) -> list[int]:
    """The positions in the whole sequence of the ``length / size`` tokens that ``rank`` holds, ascending.

    Raises:
        ConfigError: The length cannot be cut.
    """
    check_sequence_length(length, size=size)
    chunk = length if size == 1 else length // (2 * size)
    return [p for c in zigzag_chunks(rank, size=size) for p in range(c * chunk, (c + 1) * chunk)]


def shard_sequence(whole: Tensor, *, rank: int, size: int, dim: int = 1) -> Tensor:
    """What ``rank`` holds of ``whole``, ``1 / size`` of it along ``dim``.

    Raises:
        ConfigError: The length cannot be cut.
    """
    length = whole.shape[dim]
    check_sequence_length(length, size=size)
    if size == 1:
        return whole
    chunk = length // (2 * size)
    return torch.cat([whole.narrow(dim, c * chunk, chunk) for c in zigzag_chunks(rank, size=size)], dim=dim)


def unshard_sequence(parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
    """The whole of which ``shard_sequence`` made ``parts``, one per rank in order."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=dim)


def shard_batch(
    batch: Mapping[str, Any], *, rank: int, size: int, keys: Sequence[str] = SHARDED_KEYS
) -> dict[str, Any]:
    """A batch with what ``rank`` holds of each sequence.

    Targets have to be shifted already: the token that follows a chunk's last one lies on another rank. Where the
    batch has no positions they are added, for a rank's tokens do not start at 0 and are not consecutive.

    Args:
        batch: ``ids`` (B, T) and whatever else; entries not named in ``keys`` stay whole.
        rank: Among the context-parallel ranks.
        size: Context-parallel ranks.
        keys: Entries of shape (B, T, ...).

    Raises:
        ConfigError: The length cannot be cut.
    """
    if size == 1:
        return dict(batch)
    ids = batch["ids"]
    full = dict(batch)
    if "positions" not in full:
        full["positions"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {
        name: shard_sequence(value, rank=rank, size=size) if name in keys else value for name, value in full.items()
    }


@dataclass(frozen=True)
class Tile:
    """Queries ``[query_low, query_high)`` see the keys ``[0, key_high)`` of a block.

    Args:
        query_low: First query, in the order of the rank that holds them.
        query_high: Behind the last.
        key_high: Behind the last key, in the order of the rank that they come from.
        is_diagonal: Queries and keys are of one rank: each query sees the keys up to its own place only.
    """

    query_low: int
    query_high: int
    key_high: int
    is_diagonal: bool = False


def visible_tiles(rank: int, source: int, *, length: int, rows: int) -> list[Tile]:
    """What the queries of ``rank`` see of the keys of ``source`` under causal attention in zigzag order.

    Args:
        rank: Holds the queries.
        source: Held the keys at first.
        length: Tokens on each rank; even unless there is one rank only.
        rows: Queries in a tile at most.
    """
    # Two ranks' early chunks lie before both their late ones, and the late ones lie in the opposite order.
    half = length // 2
    if source == rank:
        low, key_high = 0, None
    elif source < rank:
        low, key_high = 0, half  # its early chunk lies before all of ours, its late chunk behind
    else:
        low, key_high = half, length  # all of its keys lie between our two chunks
    tiles = []
    for start in range(low, length, rows):
        stop = min(start + rows, length)
        tiles.append(Tile(start, stop, stop if key_high is None else key_high, is_diagonal=key_high is None))
    return tiles
