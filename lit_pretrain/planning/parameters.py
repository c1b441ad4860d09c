"""How many parameters an architecture has, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from lit_pretrain.specs import GPTConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by their place in the model.

    Args:
        token_embedding: Rows of real tokens.
        position_embedding: Learned positions; 0 with rotary ones.
        head: Rows of real tokens of an untied head; 0 where it shares the token embedding.
        block: One block.
        blocks: All of them.
        final_norm: The norm before the head.
        padding: Rows of embedding and head that stand for no token.
    """

    token_embedding: int
    position_embedding: int
    head: int
    block: int
    blocks: int
    final_norm: int
    padding: int

    @property
    def total(self) -> int:
        """All parameters, padding included: what ``sum(p.numel() for p in model.parameters())`` gives."""
        return self.embedding + self.non_embedding

    @property
    def embedding(self) -> int:
        """Token and position embeddings and an untied head, padding included."""
        return self.token_embedding + self.position_embedding + self.head + self.padding

    @property
    def non_embedding(self) -> int:
        """Blocks and the final norm: the N of the scaling laws of Kaplan et al. 2020."""
        return self.blocks + self.final_norm


def norm_parameters(config: GPTConfig, size: int) -> int:
    """Parameters of one norm over ``size`` features."""
    return 2 * size if config.norm == "layernorm" and config.bias else size


def matrix_parameters(config: GPTConfig) -> int:
    """Weights of the matrices of one block, without biases and norms."""
    q_width = config.n_head * config.head_size
    kv_width = config.num_kv_heads * config.head_size
    attention = config.n_embd * (2 * q_width + 2 * kv_width)
    mlp = (3 if config.mlp == "swiglu" else 2) * config.n_embd * config.ffn_size
    return attention + mlp


def bias_parameters(config: GPTConfig) -> int:
    """Biases of the matrices of one block."""
    if not config.bias:
        return 0
    q_width = config.n_head * config.head_size
    kv_width = config.num_kv_heads * config.head_size
    mlp = (2 if config.mlp == "swiglu" else 1) * config.ffn_size + config.n_embd
    return q_width + 2 * kv_width + config.n_embd + mlp


def count_parameters(config: GPTConfig) -> ParameterCount:
    """The parameters of ``GPT(config)`` without building it.

    Args:
        config: The architecture.
    """
    norms = 2 * norm_parameters(config, config.n_embd)
    if config.qk_norm:
        norms += 2 * norm_parameters(config, config.head_size)
    block = matrix_parameters(config) + bias_parameters(config) + norms
    tokens = config.vocab_size * config.n_embd
    tables = 1 if config.tie_embeddings else 2
    return ParameterCount(
        token_embedding=tokens,
        position_embedding=config.block_size * config.n_embd if config.position == "learned" else 0,
        head=0 if config.tie_embeddings else tokens,
        block=block,
        blocks=config.n_layer * block,
        final_norm=norm_parameters(config, config.n_embd),
        padding=tables * (config.padded_vocab_size - config.vocab_size) * config.n_embd,
    )
