"""Causal attention over sequences that are split over ranks: keys and values travel round a ring.

No rank ever holds more than its share of a sequence and one visiting block. Softmax is taken online, block by block,
and in the backward pass the gradients of a block travel with it until they are home. Plain tensor operations and
point-to-point messages: the same code runs on the CPU over gloo and on CUDA over NCCL.

Source: Liu et al. 2023 (ring attention); Milakov & Gimelshein 2018 (online softmax); Dao 2023 (its backward pass).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_pretrain.distributed.sequence_order import Tile, unshard_sequence, visible_tiles
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs.parallel import SETTINGS


def ring_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    group: dist.ProcessGroup,
    scale: float | None = None,
    dropout: float = 0.0,
    doc_ids_RBT: Tensor | None = None,
    rows: int = 1024,
) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks, (B, H, T, D).

    Equal to ``scaled_dot_product_attention(is_causal=True, enable_gqa=True)`` on the whole sequences, of which each
    rank holds its part in zigzag order (``shard_sequence``). Positions are the caller's: rotate queries and keys by
    their positions in the whole sequence before. Scores and sums are float32 for 16-bit inputs. Every rank of the
    group calls it, forward and backward, with equal shapes; it waits for the neighbours' messages.

    Args:
        q_BHTD: Queries, (B, H, T, D), T of the tokens here.
        k_BGTD: Keys, (B, G, T, D), G dividing H: query head h belongs to key head ``h // (H / G)``.
        v_BGTD: Values, (B, G, T, D).
        group: The ranks that share each sequence, in the order of its shards.
        scale: Of the scores; None is ``1 / sqrt(D)``.
        dropout: On attention weights; has to be 0.
        doc_ids_RBT: Document of each token on every rank, ``gather_shards`` of the (B, T) here; a token then sees its
            own document only. None is plain causal attention.
        rows: Queries at a time; the scores in memory are (B, H, rows, T) at most.

    Raises:
        ConfigError: Dropout, or an odd number of tokens on a rank.
    """
    size, length = dist.get_world_size(group), q_BHTD.shape[2]
    check_ring(dropout=dropout, size=size)
    if size > 1 and length % 2:
        raise ConfigError(
            f"Each of {SETTINGS['cp']}={size} ranks must hold two equal chunks of a sequence, not {length} tokens; "
            f"use a sequence length that is a multiple of {2 * size}."
        )
    assert k_BGTD.shape == v_BGTD.shape, (k_BGTD.shape, v_BGTD.shape)
    assert (k_BGTD.shape[0], *k_BGTD.shape[2:]) == (q_BHTD.shape[0], *q_BHTD.shape[2:]), (q_BHTD.shape, k_BGTD.shape)
    assert q_BHTD.shape[1] % k_BGTD.shape[1] == 0, (q_BHTD.shape, k_BGTD.shape)
    assert doc_ids_RBT is None or doc_ids_RBT.shape == (size, q_BHTD.shape[0], length), doc_ids_RBT.shape
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q_BHTD.device.type, enabled=False):  # it would round the float32 sums to 16 bits
        out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
            q_BHTD, k_BGTD, v_BGTD, doc_ids_RBT, group, scale, rows
        )
    return out


def check_ring(*, dropout: float, size: int) -> None:
    """Refuse what ring attention cannot do, before anything starts.

    Raises:
        ConfigError: Dropout on attention weights.
    """
    if size > 1 and dropout > 0.0:
        raise ConfigError(
            f"model.dropout={dropout} needs whole rows of attention weights, and {SETTINGS['cp']}={size} splits them; "
            f"set model.dropout=0 or {SETTINGS['cp']}=1."
        )


def gather_shards(shard: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``shard`` in order of rank, (R, ...). Every rank of the group calls; no gradient flows."""
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.detach().contiguous(), group=group)
    return torch.stack(parts)


def gather_sequence(shard: Tensor, *, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """The whole sequence of which each rank holds a zigzag shard. Every rank calls; no gradient flows."""
    return unshard_sequence(list(gather_shards(shard, group=group).unbind()), dim=dim)


@dataclass(frozen=True)
class _Passing:
    """A tensor on its way to the next rank, and the previous rank's on its way to us."""

    works: list[Any]
    sent: Tensor  # has to live until it has left
    received: Tensor

    @classmethod
    def start(cls, tensor: Tensor, group: dist.ProcessGroup) -> _Passing:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
        )
        return cls(works, tensor, received)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _RingAttention(torch.autograd.Function):
    """Queries are (B, G, Q, T, D) inside, Q = H / G query heads to a key head; "acc" tensors are float32 or more."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        doc_ids_RBT: Tensor | None,
        group: dist.ProcessGroup,
        scale: float,
        rows: int,
    ) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        B, H, T, D = q_BHTD.shape
        G = k_BGTD.shape[1]
        acc = torch.promote_types(q_BHTD.dtype, torch.float32)
        q = q_BHTD.reshape(B, G, H // G, T, D)
        out = torch.zeros(q.shape, dtype=acc, device=q.device)
        peak = torch.full(q.shape[:-1], float("-inf"), dtype=acc, device=q.device)
        total = torch.zeros_like(peak)
        kv = torch.stack([k_BGTD, v_BGTD])
        for hop in range(size):
            source = (rank - hop) % size
            passing = _Passing.start(kv, group) if hop < size - 1 else None
            # The first block is our own, where every query sees itself: from then on no peak is infinite.
            k, v = kv.to(acc).unbind()
            for tile in visible_tiles(rank, source, length=T, rows=rows):
                at = (..., slice(tile.query_low, tile.query_high))
                scores = _scores(q[..., tile.query_low : tile.query_high, :].to(acc), k, tile, scale)
                _hide(scores, tile, doc_ids_RBT, rank, source)
                new_peak = torch.maximum(peak[at], scores.amax(-1))
                weights = scores.sub_(new_peak[..., None]).exp_()
                shrink = (peak[at] - new_peak).exp_()
                total[at] = total[at] * shrink + weights.sum(-1)
                rows_out = out[..., tile.query_low : tile.query_high, :]
                rows_out.mul_(shrink[..., None]).add_(_fold(weights, v[:, :, : tile.key_high]))
                peak[at] = new_peak
            if passing is not None:
                kv = passing.wait()
        out_BHTD = (out / total[..., None]).view(B, H, T, D).to(q_BHTD.dtype)
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, doc_ids_RBT, out_BHTD, peak + total.log())
        ctx.group, ctx.scale, ctx.rows = group, scale, rows
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BGTD, v_BGTD, doc_ids_RBT, out_BHTD, log_total = ctx.saved_tensors
        group, scale = ctx.group, ctx.scale
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        T, acc = q_BHTD.shape[2], log_total.dtype
        q = q_BHTD.reshape(*log_total.shape, -1)
        grad_out = grads[0].reshape(q.shape)
        drift = (grad_out.to(acc) * out_BHTD.reshape(q.shape).to(acc)).sum(-1)
        grad_q = torch.zeros(q.shape, dtype=acc, device=q.device)
        kv = torch.stack([k_BGTD, v_BGTD])
        returning: _Passing | None = None
        for hop in range(size):
            source = (rank - hop) % size
            passing = _Passing.start(kv, group) if hop < size - 1 else None
            k, v = kv.to(acc).unbind()
            grad_kv = torch.zeros(kv.shape, dtype=acc, device=kv.device)
            for tile in visible_tiles(rank, source, length=T, rows=ctx.rows):
                queries, at = slice(tile.query_low, tile.query_high), slice(0, tile.key_high)
                q_tile, grad_tile = q[..., queries, :].to(acc), grad_out[..., queries, :].to(acc)
                scores = _scores(q_tile, k, tile, scale)
                _hide(scores, tile, doc_ids_RBT, rank, source)
                weights = scores.sub_(log_total[..., queries, None]).exp_()
                grad_kv[1][:, :, at] += _fold_back(weights, grad_tile)
                grad_scores = _scores(grad_tile, v, tile, 1.0).sub_(drift[..., queries, None]).mul_(weights).mul_(scale)
                grad_q[..., queries, :] += _fold(grad_scores, k[:, :, at])
                grad_kv[0][:, :, at] += _fold_back(grad_scores, q_tile)
            if returning is not None:  # what the ranks before us have added to this block's gradients
                grad_kv += returning.wait()
            if size > 1:
                returning = _Passing.start(grad_kv, group)
            if passing is not None:
                kv = passing.wait()
        if returning is not None:  # the last pass brings our own block's gradients home
            grad_kv = returning.wait()
        grad_k, grad_v = grad_kv.unbind()
        return (
            grad_q.view(q_BHTD.shape).to(q_BHTD.dtype),
            grad_k.to(k_BGTD.dtype),
            grad_v.to(v_BGTD.dtype),
            None,
            None,
            None,
            None,
        )


def _scores(q_BGQTD: Tensor, k_BGSD: Tensor, tile: Tile, scale: float) -> Tensor:
    """Products of a tile's queries with its keys, (B, G, Q, rows, keys)."""
    B, G, Q, rows, D = q_BGQTD.shape
    flat = q_BGQTD.reshape(B, G, Q * rows, D) @ k_BGSD[:, :, : tile.key_high].transpose(-1, -2)
    return flat.mul_(scale).view(B, G, Q, rows, tile.key_high)


def _hide(scores: Tensor, tile: Tile, doc_ids_RBT: Tensor | None, rank: int, source: int) -> None:
    """Set the scores of keys that a query may not see to minus infinity."""
    if tile.is_diagonal:
        keys = torch.arange(tile.key_high, device=scores.device)
        queries = torch.arange(tile.query_low, tile.query_high, device=scores.device)
        scores.masked_fill_(keys[None, :] > queries[:, None], float("-inf"))
    if doc_ids_RBT is not None:
        own = doc_ids_RBT[rank][:, tile.query_low : tile.query_high, None]
        scores.masked_fill_((own != doc_ids_RBT[source][:, None, : tile.key_high])[:, None, None], float("-inf"))


def _fold(weights_BGQTS: Tensor, v_BGSD: Tensor) -> Tensor:
    """Sums of values (or keys) over a tile's keys, (B, G, Q, rows, D)."""
    B, G, Q, rows, S = weights_BGQTS.shape
    return (weights_BGQTS.reshape(B, G, Q * rows, S) @ v_BGSD).view(B, G, Q, rows, -1)


def _fold_back(weights_BGQTS: Tensor, q_BGQTD: Tensor) -> Tensor:
    """Sums over a tile's queries and the heads that share a key head, (B, G, keys, D)."""
    B, G, Q, rows, S = weights_BGQTS.shape
    return weights_BGQTS.reshape(B, G, Q * rows, S).transpose(-1, -2) @ q_BGQTD.reshape(B, G, Q * rows, -1)
