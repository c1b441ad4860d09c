"""Causal self-attention with grouped queries, and who may look at whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_pretrain.models.cache import LayerCache
from lit_pretrain.models.norms import build_norm
from lit_pretrain.models.rope import rotate
from lit_pretrain.specs import GPTConfig


@dataclass(frozen=True)
class AttentionContext:
    """What every block of one forward pass shares.

    A plain object, not loose tensors: FSDP's mixed precision would cast float arguments of a block to 16 bits, and
    the rotation must stay in float32.

    Args:
        cos: Cosines that broadcast against (B, T, H, D/2); None without rotary positions.
        sin: Sines, likewise.
        mask_B1TS: True where a query may see a key; None where ``is_causal`` says it all.
        is_causal: Plain causal attention among the new tokens.
        cache_length: Tokens already in the cache.
        doc_ids_BT: Document of each new token, for whoever computes attention otherwise; None: a row is one document.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    mask_B1TS: Tensor | None = None  # noqa: N815
    is_causal: bool = True
    cache_length: int = 0
    doc_ids_BT: Tensor | None = None  # noqa: N815


def causal_mask(query_length: int, key_length: int, *, device: torch.device) -> Tensor:
    """(T, S), True where the key's slot is not after the query's; queries are the last T of the S slots."""
    slots_S = torch.arange(key_length, device=device)
    return slots_S[None, :] <= slots_S[key_length - query_length :, None]


def document_mask(query_docs_BT: Tensor, key_docs_BS: Tensor) -> Tensor:
    """(B, 1, T, S): causal, and the key belongs to the query's document. A token always sees itself."""
    causal_TS = causal_mask(query_docs_BT.shape[1], key_docs_BS.shape[1], device=query_docs_BT.device)
    return (causal_TS & (query_docs_BT[:, :, None] == key_docs_BS[:, None, :]))[:, None]


class Attention(nn.Module):
    """Multi-head attention; queries, keys and values are separate layers so that heads can be split over ranks.

    Args:
        config: The architecture.

    Source: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); Dehghani et al. 2023 (QK norm).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.grouped = config.num_kv_heads != config.n_head
        q_width, kv_width = config.n_head * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.n_embd, q_width, bias=config.bias)
        self.k_proj = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(q_width, config.n_embd, bias=config.bias)
        self.q_norm = build_norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = build_norm(config, config.head_size) if config.qk_norm else None

    def forward(self, x_BTC: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """What the block adds to the residual stream, (B, T, C).

        Args:
            x_BTC: Normalised residual stream.
            context: Rotation and mask.
            cache: Keys and values of earlier tokens; the new ones are appended.
        """
        B, T, _ = x_BTC.shape
        # -1, not n_head: on a tensor-parallel rank a projection yields its own heads only.
        q_BTHD = self.q_proj(x_BTC).view(B, T, -1, self.head_size)
        k_BTHD = self.k_proj(x_BTC).view(B, T, -1, self.head_size)
        v_BTHD = self.v_proj(x_BTC).view(B, T, -1, self.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTHD = self.q_norm(q_BTHD), self.k_norm(k_BTHD)
        if context.cos is not None and context.sin is not None:
            q_BTHD = rotate(q_BTHD, context.cos, context.sin)
            k_BTHD = rotate(k_BTHD, context.cos, context.sin)
        if cache is not None:
            k_BTHD, v_BTHD = cache.append(k_BTHD, v_BTHD, start=context.cache_length)
        y_BHTD = self.attend(q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2), context)
        out: Tensor = self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return out

    def attend(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, context: AttentionContext) -> Tensor:
        """Weighted sums of values, (B, H, T, D). Where ranks share a sequence, they put something else in its place.

        Args:
            q_BHTD: Rotated queries.
            k_BGSD: Rotated keys, those of the cache included.
            v_BGSD: Values.
            context: Mask.
        """
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            attn_mask=context.mask_B1TS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=context.is_causal,
            enable_gqa=self.grouped,
        )
