"""A decoder-only transformer in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.models.attention import Attention, AttentionContext, causal_mask, document_mask
from lit_pretrain.models.cache import KVCache, LayerCache
from lit_pretrain.models.checkpointing import ActivationCheckpointing, run_checkpointed
from lit_pretrain.models.init import init_weights
from lit_pretrain.models.loss import LossSums, chunked_cross_entropy
from lit_pretrain.models.mlp import MLP
from lit_pretrain.models.norms import build_norm
from lit_pretrain.models.plan import gpt_plan
from lit_pretrain.models.rope import RotaryTable
from lit_pretrain.models.vocabulary import gathered_logits, local_rows
from lit_pretrain.specs import GPTConfig, ParallelPlan


class Block(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream.

    Args:
        config: The architecture.
        activation_checkpointing: What backward recomputes. It lives here, inside the block, so that a wrapper around
            a block (sharding, compilation) finds it already done and no name changes.
    """

    def __init__(self, config: GPTConfig, *, activation_checkpointing: ActivationCheckpointing = "none") -> None:
        super().__init__()
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        self.attn_norm = build_norm(config, config.n_embd)
        self.attn = Attention(config)
        self.mlp_norm = build_norm(config, config.n_embd)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x_BTC: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """The residual stream after this block, (B, T, C)."""
        return run_checkpointed(self._forward, x_BTC, context, cache, mode=self.activation_checkpointing)

    def _forward(self, x_BTC: Tensor, context: AttentionContext, cache: LayerCache | None) -> Tensor:
        x_BTC = x_BTC + self._drop(self.attn(self.attn_norm(x_BTC), context, cache))
        return x_BTC + self._drop(self.mlp(self.mlp_norm(x_BTC)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0.0 else x


class GPT(nn.Module):
    """A GPT that knows nothing of devices, ranks or strategies.

    A model with tied embeddings holds one tensor under one name, ``wte.weight``, and has no ``head``: nothing can come
    untied. Rows of padding in embedding and head start at zero and are never read: no id selects them and they stand
    outside the log-partition, so their gradient is exactly zero, AdamW's update and weight decay of a zero row are
    zero, and they stay zero. Were a checkpoint to bring other values, they would still change nothing.

    Built under ``torch.device("meta")`` it stays empty: call ``to_empty(device=...)`` and then ``init_weights``.
    Otherwise its weights come from seed 0.

    Args:
        config: The architecture.
        activation_checkpointing: ``none``, ``selective`` (keep matrix products and attention) or ``full`` (keep the
            inputs of blocks).
        loss_chunk_size: Tokens whose logits the loss holds at once.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=32))
        >>> ids = torch.randint(256, (4, 64))
        >>> sums = model.loss(model(ids[:, :-1]), ids[:, 1:])
        >>> (sums.nll_sum / sums.num_targets).backward()
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        activation_checkpointing: ActivationCheckpointing = "none",
        loss_chunk_size: int = 256,
    ) -> None:
        super().__init__()
        if activation_checkpointing not in ("none", "selective", "full"):
            raise ConfigError(
                f"activation_checkpointing={activation_checkpointing!r} is unknown; use none, selective or full."
            )
        if isinstance(loss_chunk_size, bool) or not isinstance(loss_chunk_size, int) or loss_chunk_size < 1:
            raise ConfigError(f"loss_chunk_size={loss_chunk_size!r} must be a whole number of at least 1.")
        self.config = config
        self.loss_chunk_size = loss_chunk_size
        self.rope = RotaryTable(config) if config.position == "rope" else None
        device = torch.get_default_device()
        # Built empty first: torch's own initialisation would be thrown away and would draw from the global generator.
        with torch.device("meta"):
            self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
            self.blocks = nn.ModuleDict(
                {
                    str(i): Block(config, activation_checkpointing=activation_checkpointing)
                    for i in range(config.n_layer)
                }
            )
            self.norm = build_norm(config, config.n_embd)
            self.head = (
                None if config.tie_embeddings else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
            )
        if device.type != "meta":
            self.to_empty(device=device)
            init_weights(self, seed=0)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        doc_ids_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The last hidden state, after the final norm.

        Args:
            ids_BT: Token ids, (B, T), int64, below ``config.vocab_size``.
            positions_BT: Position of each token, (B, T), int64; None counts from the cache's end (0 without one).
            doc_ids_BT: Document of each token, (B, T), int64; a token sees only its own document. Positions should
                then start at 0 in each. None: the row is one document.
            cache: Earlier keys and values; the new ones are appended.

        Returns:
            (B, T, C).

        Raises:
            ConfigError: The sequence is longer than ``config.block_size``.
        """
        context = self.attention_context(ids_BT, positions_BT, doc_ids_BT, cache)
        x_BTC = self.embed(ids_BT, positions_BT, start=context.cache_length)
        for key, block in self.blocks.items():
            x_BTC = block(x_BTC, context, cache.layers[key] if cache is not None else None)
        if cache is not None:
            cache.length += ids_BT.shape[1]
        out: Tensor = self.norm(x_BTC)
        return out

    def embed(self, ids_BT: Tensor, positions_BT: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Token and learned position embeddings, (B, T, C).

        Args:
            ids_BT: Token ids.
            positions_BT: Positions, or None for ``start, start + 1, ...``.
            start: First position where ``positions_BT`` is None.
        """
        x_BTC: Tensor = self.wte(ids_BT)
        if self.wpe is not None:
            if positions_BT is None:
                positions_BT = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
            x_BTC = x_BTC + self.wpe(positions_BT)
        return F.dropout(x_BTC, self.config.dropout, self.training) if self.config.dropout > 0.0 else x_BTC

    def attention_context(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        doc_ids_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> AttentionContext:
        """Rotation and mask of one forward pass, shared by all blocks."""
        length = ids_BT.shape[1]
        start = cache.length if cache is not None else 0
        if start + length > self.config.block_size:
            raise ConfigError(
                f"A sequence of {start + length} tokens is longer than model.block_size={self.config.block_size}; "
                f"shorten it or raise model.block_size."
            )
        cos = sin = None
        if self.rope is not None:
            dtype = torch.float64 if self.wte.weight.dtype == torch.float64 else torch.float32
            cos, sin = self.rope(positions_BT, start=start, length=length, device=ids_BT.device, dtype=dtype)
        key_docs_BS = cache.remember_documents(doc_ids_BT, length=length) if cache is not None else doc_ids_BT
        mask = None
        if key_docs_BS is not None:
            mask = document_mask(key_docs_BS[:, start:], key_docs_BS)
        elif start > 0 and length > 1:
            mask = causal_mask(length, start + length, device=ids_BT.device)[None, None]
        return AttentionContext(
            cos=cos,
            sin=sin,
            mask_B1TS=mask,
            is_causal=mask is None and start == 0,
            cache_length=start,
            doc_ids_BT=doc_ids_BT,
        )

    @property
    def parallel_plan(self) -> ParallelPlan:
        """How this model can be split over ranks."""
        return gpt_plan(self.config)

    @property
    def unembedding(self) -> Tensor:
        """The head's weight, (padded V, C)."""
        return self.wte.weight if self.head is None else self.head.weight

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Next-token logits, (B, T, padded V); padding is -inf.

        Args:
            hidden_BTC: From ``forward``.
        """
        logits_BTV = gathered_logits(hidden_BTC, self.unembedding)
        if self.config.padded_vocab_size > self.config.vocab_size:
            logits_BTV[..., self.config.vocab_size :] = float("-inf")
        return logits_BTV

    def loss(self, hidden_BTC: Tensor, targets_BT: Tensor) -> LossSums:
        """Sums over the valid targets; differentiate ``nll_sum + z_loss_sum`` over your own denominator.

        Args:
            hidden_BTC: From ``forward``.
            targets_BT: Target ids, (B, T), int64; -100 where nothing is to be predicted.
        """
        weight_VC, shard = local_rows(self.unembedding)
        return chunked_cross_entropy(
            hidden_BTC.reshape(-1, hidden_BTC.shape[-1]),
            weight_VC,
            targets_BT.reshape(-1),
            vocab_size=self.config.vocab_size,
            z_loss=self.config.z_loss,
            chunk_size=self.loss_chunk_size,
            shard=shard,
        )
