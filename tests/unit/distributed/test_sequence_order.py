"""The zigzag order, by hand."""

from __future__ import annotations

import pytest
import torch

from lit_pretrain.distributed.sequence_order import (
    check_sequence_length,
    shard_batch,
    shard_sequence,
    unshard_sequence,
    visible_tiles,
    zigzag_chunks,
    zigzag_positions,
)
from lit_pretrain.errors import ConfigError

# (size, length): positions of every rank
TABLES = {
    (1, 5): [[0, 1, 2, 3, 4]],
    (2, 8): [[0, 1, 6, 7], [2, 3, 4, 5]],
    (2, 4): [[0, 3], [1, 2]],
    (3, 12): [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
    (4, 8): [[0, 7], [1, 6], [2, 5], [3, 4]],
}


@pytest.mark.parametrize(("size", "length"), TABLES)
def test_positions(size, length):
    table = TABLES[size, length]
    assert [zigzag_positions(length, rank=r, size=size) for r in range(size)] == table
    whole = torch.arange(2 * length).view(2, length, 1) * 10
    shards = [shard_sequence(whole, rank=r, size=size) for r in range(size)]
    assert [s[0, :, 0].tolist() for s in shards] == [[10 * p for p in row] for row in table]
    assert torch.equal(unshard_sequence(shards), whole)
    turned = whole.transpose(0, 1)
    assert torch.equal(
        unshard_sequence([shard_sequence(turned, rank=r, size=size, dim=0) for r in range(size)], dim=0), turned
    )


def test_chunks():
    assert [zigzag_chunks(r, size=4) for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert zigzag_chunks(0, size=1) == (0,)


@pytest.mark.parametrize(
    ("length", "size", "match"),
    [
        (
            30,
            4,
            r"data\.sequence_length=30 .* 2 x strategy\.context_parallel_size=4; use 24 or 32 tokens, or 1, 3, 5 or 15",
        ),
        (36, 4, r"use 32 or 40 tokens, or 1, 2, 3, 6, 9 or 18 context-parallel ranks"),
        (6, 4, r"use 8 tokens, or 1 or 3 context-parallel ranks"),
        (7, 2, r"use 4 or 8 tokens, or 1 context-parallel ranks"),
        (0, 2, r"use 4 tokens, or 1 context-parallel ranks"),
    ],
)
def test_a_length_that_cannot_be_cut_is_refused(length, size, match):
    with pytest.raises(ConfigError, match=match):
        check_sequence_length(length, size=size)
    with pytest.raises(ConfigError):
        shard_sequence(torch.zeros(1, length), rank=0, size=size)
    with pytest.raises(ConfigError):
        zigzag_positions(length, rank=0, size=size)


def test_a_batch_gets_positions_and_keeps_the_rest():
    ids = torch.arange(16).view(2, 8)
    batch = {"ids": ids, "targets": ids + 1, "source": torch.tensor([3, 4]), "index": 7}
    got = shard_batch(batch, rank=0, size=2)
    assert got["ids"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert got["targets"].tolist() == [[1, 2, 7, 8], [9, 10, 15, 16]]
    assert got["positions"].tolist() == [[0, 1, 6, 7]] * 2
    assert got["source"].tolist() == [3, 4]
    assert got["index"] == 7
    assert "positions" not in batch
    assert shard_batch(batch, rank=0, size=1) == batch


def test_a_batch_keeps_positions_of_its_own():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batch = {
        "ids": ids,
        "positions": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]),
        "doc_ids": torch.tensor([[0] * 3 + [1] * 4 + [2]]),
    }
    got = shard_batch(batch, rank=1, size=2)
    assert got["positions"].tolist() == [[2, 0, 1, 2]]
    assert got["doc_ids"].tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_tiles_are_what_is_causal(size, rows):
    """Against the definition: a query sees a key at its own position or before."""
    length = 12 * size
    for rank in range(size):
        mine, area = zigzag_positions(length, rank=rank, size=size), 0
        for source in range(size):
            theirs = zigzag_positions(length, rank=source, size=size)
            seen = [[False] * 12 for _ in range(12)]
            for tile in visible_tiles(rank, source, length=12, rows=rows):
                assert 0 < tile.query_high - tile.query_low <= rows
                for q in range(tile.query_low, tile.query_high):
                    for k in range(tile.key_high):
                        assert not seen[q][k]
                        seen[q][k] = k <= q if tile.is_diagonal else True
            assert seen == [[k <= q for k in theirs] for q in mine]
            area += sum(map(sum, seen))
        # The same work everywhere: a diagonal of 12 x 13 / 2 and half a block from every other rank.
        assert area == 78 + (size - 1) * 72
