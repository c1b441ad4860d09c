"""Ring attention over 2 and 4 ranks against attention over whole sequences in one process, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from lit_pretrain.distributed.ring_attention import gather_sequence, gather_shards, ring_attention
from lit_pretrain.distributed.sequence_order import shard_sequence
from lit_pretrain.errors import ConfigError, RankError
from lit_pretrain.models.rope import RotaryTable, rotate
from lit_pretrain.specs import GPTConfig

BOUND = 1e-12  # max |difference| over max(1, max |value|): the design's
B, D = 2, 8
NAMES = ("out", "q", "k", "v")


def inputs(heads, kv_heads, length, dtype=torch.float64, seed=0):
    """Queries, keys, values and the gradient of the output, whole, (B, heads, T, D)."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, heads, length, D), (B, kv_heads, length, D), (B, kv_heads, length, D), (B, heads, length, D)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def documents(length, seed=0):
    """(B, T): documents of random lengths; the first row is one document."""
    g = torch.Generator().manual_seed(seed)
    ids = (torch.rand(B, length, generator=g) < 0.15).cumsum(1)
    ids[0] = 5
    return ids


def reference(heads, kv_heads, length, *, scale=None, docs=False, rope=False, seed=0):
    """Output and gradients of queries, keys and values, whole."""
    q, k, v, grad = inputs(heads, kv_heads, length, seed=seed)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if rope:
        q, k = (turn(t, torch.arange(length).expand(B, -1)) for t in (q, k))
    mask = None
    if docs:
        ids = documents(length)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not docs, scale=scale, enable_gqa=heads != kv_heads
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def turn(x_BHTD, positions_BT):
    """Rotate by positions, as a caller of ring attention does."""
    config = GPTConfig(vocab_size=8, block_size=256, n_layer=1, n_head=1, n_embd=D, position="rope")
    cos, sin = RotaryTable(config)(
        positions_BT, start=0, length=x_BHTD.shape[2], device=x_BHTD.device, dtype=x_BHTD.dtype
    )
    return rotate(x_BHTD.transpose(1, 2), cos, sin).transpose(1, 2)


def run(heads, kv_heads, length, dtype, scale, docs, rope, rows, mesh_shape=None):
    """Output and gradients, gathered to whole sequences on every rank."""
    if mesh_shape is None:
        group, seed = dist.group.WORLD, 0
    else:  # the ring runs inside rows of the mesh, each row with data of its own
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "cp"))
        group, seed = mesh.get_group("cp"), mesh.get_local_rank("dp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    q, k, v, grad = (
        shard_sequence(t, rank=rank, size=size, dim=2) for t in inputs(heads, kv_heads, length, dtype, seed)
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if rope:
        positions = shard_sequence(torch.arange(length).expand(B, -1), rank=rank, size=size)
        q, k = turn(q, positions), turn(k, positions)
    ids = gather_shards(shard_sequence(documents(length), rank=rank, size=size), group=group) if docs else None
    # As a model gives them: views that are not contiguous.
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    out = ring_attention(q, k, v, group=group, scale=scale, doc_ids_RBT=ids, rows=rows)
    assert out.dtype == dtype
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return [gather_sequence(t, group=group, dim=2) for t in results]


def differences(got, want):
    return {
        name: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for name, a, b in zip(NAMES, got, want, strict=True)
    }


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "length", "options"),
    [
        (2, 4, 4, 32, {}),
        (2, 4, 2, 28, {"scale": 0.3}),
        (4, 4, 1, 32, {}),
        (4, 6, 2, 24, {"rows": 2}),  # chunks of 3, tiles of 2
        (4, 2, 2, 8, {}),  # chunks of one token
        (2, 4, 2, 32, {"rope": True}),
        (4, 4, 2, 48, {"docs": True}),
        (2, 2, 2, 20, {"docs": True, "rows": 3, "rope": True}),
        (1, 4, 2, 7, {}),
    ],
    ids=str,
)
def test_parity(ranks, size, heads, kv_heads, length, options):
    settings = {"scale": None, "docs": False, "rope": False} | {k: v for k, v in options.items() if k != "rows"}
    want = reference(heads, kv_heads, length, **settings)
    args = (settings["scale"], settings["docs"], settings["rope"], options.get("rows", 1024))
    for got in ranks(size, run, heads, kv_heads, length, torch.float64, *args, init=True):
        found = differences(got, want)
        assert all(value <= BOUND for value in found.values()), found


def test_rings_inside_a_larger_mesh(ranks):
    """Ranks 2 and 3 form a ring of their own: its neighbours are not ranks 0 and 1."""
    got = ranks(4, run, 2, 1, 16, torch.float64, None, False, False, 1024, (2, 2), init=True)
    for rank, result in enumerate(got):
        found = differences(result, reference(2, 1, 16, seed=rank // 2))
        assert all(value <= BOUND for value in found.values()), found


def test_sixteen_bits_lose_no_more_than_rounding(ranks):
    """Sums are float32: what is off is the rounding of inputs and results, 2^-9 of a value each, and of the output
    where the backward pass uses it."""
    rounded = [t.bfloat16().double() for t in inputs(4, 2, 32)]
    leaves = [t.requires_grad_() for t in rounded[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    want = [out.detach(), *torch.autograd.grad(out, leaves, rounded[3])]
    for got in ranks(2, run, 4, 2, 32, torch.bfloat16, None, False, False, 1024, init=True):
        found = differences(got, want)
        assert found["out"] <= 2**-9 * 1.01
        assert all(value <= 2**-7 for value in found.values()), found


def under_autocast():
    q, k, v, _ = (shard_sequence(t, rank=dist.get_rank(), size=2, dim=2).float() for t in inputs(2, 2, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ring_attention(q, k, v, group=dist.group.WORLD)
    return gather_sequence(out, group=dist.group.WORLD, dim=2)


def test_autocast_does_not_round_the_sums(ranks):
    for got in ranks(2, under_autocast, init=True):
        assert got.dtype == torch.float32
        assert (got.double() - reference(2, 2, 16)[0]).abs().max() < 1e-5


def huge_scores():
    q, k, v, _ = (shard_sequence(t, rank=dist.get_rank(), size=2, dim=2) for t in inputs(1, 1, 16))
    out = ring_attention(1e3 * q, 1e3 * k, v, group=dist.group.WORLD)
    return gather_sequence(out, group=dist.group.WORLD, dim=2)


def test_scores_whose_exponential_would_overflow(ranks):
    q, k, v, _ = inputs(1, 1, 16)
    want = F.scaled_dot_product_attention(1e3 * q, 1e3 * k, v, is_causal=True)
    for got in ranks(2, huge_scores, init=True):
        assert (got - want).abs().max() < 1e-9


def messages(size):
    """Bytes that this rank sends forward and backward, and its calls."""
    sent = []
    start = dist.batch_isend_irecv

    def counting(ops):
        sent.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        return start(ops)

    dist.batch_isend_irecv = counting
    q, k, v, grad = (shard_sequence(t, rank=dist.get_rank(), size=size, dim=2) for t in inputs(4, 2, 16))
    out = ring_attention(q.requires_grad_(), k, v, group=dist.group.WORLD)
    forward = list(sent)
    out.backward(grad)
    return forward, sent[len(forward) :]


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_what_theory_says(ranks, size):
    """Forward: keys and values make n - 1 hops. Backward: they do again, and their gradients make n."""
    block = 2 * B * 2 * (16 // size) * D * 8  # keys and values, 2 heads, 8 bytes
    for forward, backward in ranks(size, messages, size, init=True):
        assert forward == [block] * (size - 1)
        assert sorted(backward) == [block] * (2 * size - 1)


def refused(length, dropout):
    x = torch.zeros(1, 1, length, 4)
    ring_attention(x, x, x, group=dist.group.WORLD, dropout=dropout)


@pytest.mark.parametrize(
    ("length", "dropout", "match"),
    [
        (4, 0.1, r"model\.dropout=0\.1 needs whole rows of attention weights, and strategy\.context_parallel_size=2"),
        (3, 0.0, r"two equal chunks of a sequence, not 3 tokens; use a sequence length that is a multiple of 4"),
    ],
)
def test_what_it_cannot_do_is_refused(ranks, length, dropout, match):
    with pytest.raises(RankError, match=match) as error:
        ranks(2, refused, length, dropout, init=True)
    assert ConfigError.__name__ in str(error.value)
