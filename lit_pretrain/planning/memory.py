"""Bytes that one rank holds while it trains, in closed form: plain data parallelism, every rank the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.parameters import bias_parameters, count_parameters, matrix_parameters
from lit_pretrain.specs import GPTConfig

LOSS_CHUNK = 256
"""Tokens whose logits the model's loss holds at once, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Bytes of a number under one of Lightning's precisions.

    Args:
        weight: Of a parameter, of its gradient and of each of its optimizer moments.
        compute: Of the factors of a matrix product.
        is_mixed: Autocast makes the factors, so each product keeps a copy of its own.
        has_masters: All parameters have a copy for computing, which stays.
    """

    weight: int
    compute: int
    is_mixed: bool = False
    has_masters: bool = False

    @property
    def wide(self) -> int:
        """Of statistics of norms, log-sums of attention and logits: float32, or float64 where all is."""
        return max(4, self.compute)


_FULL, _MIXED = NumberFormat(weight=4, compute=4), NumberFormat(weight=4, compute=2, is_mixed=True)
_MASTERS = NumberFormat(weight=4, compute=2, is_mixed=True, has_masters=True)
_DOUBLE, _HALF = NumberFormat(weight=8, compute=8), NumberFormat(weight=2, compute=2)
NUMBER_FORMATS: dict[str, NumberFormat] = {
    "64": _DOUBLE,
    "64-true": _DOUBLE,
    "32": _FULL,
    "32-true": _FULL,
    "16": _MIXED,
    "16-mixed": _MIXED,
    "bf16": _MASTERS,
    "fp16": _MASTERS,
    "bf16-mixed": _MIXED,
    "16-true": _HALF,
    "bf16-true": _HALF,
}
"""By the words of ``Trainer(precision=...)``; ``bf16`` and ``fp16`` are those of ``MasterWeightPrecision``."""


def precision_word(precision: object) -> str:
    """How a run computes, in one of the words of :data:`NUMBER_FORMATS` where it is known.

    Args:
        precision: Such a word, or the node of a ``MasterWeightPrecision``.
    """
    if isinstance(precision, Mapping):
        word = str(precision.get("precision", "bf16"))
        return "32-true" if word == "fp32" else word
    return str(precision)


@dataclass(frozen=True, kw_only=True)
class MemoryPerRank:
    """Bytes by what they are for.

    Args:
        weights: Parameters, padding included.
        gradients: One per parameter.
        optimizer: Moments.
        buckets: Second copy of the gradients that data parallelism sends; 0 where they are one.
        casts: 16-bit copies: of the blocks' matrices and biases, which autocast keeps from forward to backward, or of
            everything, where there are master weights.
        activations: What backward needs, kept by forward.
        loss: Logits of a chunk, and the gradients of hidden states and head that the loss computes ahead.
    """

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    casts: int
    activations: int
    loss: int

    @property
    def states(self) -> int:
        """What stays from update to update, whatever the batch."""
        return self.weights + self.gradients + self.optimizer + self.buckets

    @property
    def total(self) -> int:
        """Everything at once: an upper bound, since gradients grow while activations go."""
        return self.states + self.casts + self.activations + self.loss


def memory_per_rank(
    config: GPTConfig,
    *,
    tokens: int,
    precision: str,
    activation_checkpointing: str = "none",
    moments: int = 2,
    gradient_copies: int = 0,
) -> MemoryPerRank:
    """The memory of one rank that holds the whole model.

    Not counted: the framework itself and what the allocator cannot use, workspaces of matrix products, a second
    model for evaluation, and the optimizer's step counter of 4 bytes a tensor.

    Args:
        config: The architecture.
        tokens: In one microbatch of one rank.
        precision: One of :data:`NUMBER_FORMATS`.
        activation_checkpointing: ``none``, ``selective`` or ``full``.
        moments: Numbers that the optimizer keeps per parameter: 2 for Adam.
        gradient_copies: Copies of the gradients besides themselves: 1 for DDP without ``gradient_as_bucket_view``.

    Raises:
        ConfigError: A word is unknown or a count impossible.
    """
    numbers = number_format(precision)
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} in a microbatch must be at least 1.")
    parameters = count_parameters(config).total
    matrices = config.n_layer * (matrix_parameters(config) + bias_parameters(config))
    return MemoryPerRank(
        weights=parameters * numbers.weight,
        gradients=parameters * numbers.weight,
        optimizer=parameters * numbers.weight * moments,
        buckets=parameters * numbers.weight * gradient_copies,
        casts=(parameters if numbers.has_masters else matrices) * numbers.compute if numbers.is_mixed else 0,
        activations=activation_bytes(
            config, tokens=tokens, precision=precision, activation_checkpointing=activation_checkpointing
        ),
        loss=loss_bytes(config, tokens=tokens, precision=precision),
    )


def number_format(precision: str) -> NumberFormat:
    """The bytes of a precision.

    Raises:
        ConfigError: It is none of :data:`NUMBER_FORMATS`.
    """
    if precision not in NUMBER_FORMATS:
        raise ConfigError(f"precision={precision!r} is unknown here; use one of {', '.join(NUMBER_FORMATS)}.")
    return NUMBER_FORMATS[precision]


def activation_bytes(config: GPTConfig, *, tokens: int, precision: str, activation_checkpointing: str = "none") -> int:
    """What all blocks and the final norm keep for backward, for attention that never stores its (T, T) weights.

    Per token and block, in numbers of the residual stream (r) and of matrix products (e), with width C, query width Q,
    key width K and feed-forward width F:

    * ``none``: both norms' inputs, 2 C r; the input of the query, key and value products, C e (3 C e under autocast,
      which casts for each product anew); queries, keys, values and the attention's result, (2 Q + 2 K) e; the input of
      the first feed-forward product, C e (twice for swiglu under autocast), its result and the activation's, 2 F e, or
      4 F e for swiglu; and, no narrower than float32, the norms' statistics and a log-sum per head.
    * ``selective``: the block's input, C r; the results of all products and of attention, and its log-sums.
    * ``full``: the block's input, C r. Backward holds one block as under ``none`` besides, counted for both.

    At Q = K = C and F = 4 C that is 16 C numbers: Korthikanti's 34 s b h bytes in 16 bits, less the dropout masks.
    Exact for float32, float64 and mixed precision; with dropout, add a mask of a byte for each of 2 C numbers; with
    normed queries and keys under mixed precision, and in pure 16 bits, it is an estimate. Compiled blocks keep less.

    Args:
        config: The architecture.
        tokens: In one microbatch of one rank.
        precision: One of :data:`NUMBER_FORMATS`.
        activation_checkpointing: ``none``, ``selective`` or ``full``.

    Raises:
        ConfigError: A word is unknown.

    Source: Korthikanti et al. 2022, section 4, without the part that flash attention (Dao et al. 2022) saves.
    """
    if activation_checkpointing not in ("none", "selective", "full"):
        raise ConfigError(
            f"activation_checkpointing={activation_checkpointing!r} is unknown; use none, selective or full."
        )
    numbers = number_format(precision)
    whole, kept = _block_bytes(config, numbers), _kept_bytes(config, numbers, activation_checkpointing)
    working = 0 if activation_checkpointing == "none" else whole
    final_norm = 2 * config.n_embd * numbers.weight + _norm_statistics(config, numbers)
    return tokens * (config.n_layer * kept + working + final_norm)


def _kept_bytes(config: GPTConfig, numbers: NumberFormat, mode: str) -> int:
    """Per token and block, from its forward to its backward."""
    if mode == "none":
        return _block_bytes(config, numbers)
    stream = config.n_embd * numbers.weight
    if mode == "full":
        return stream
    q_width, kv_width = _widths(config)
    first_products = 2 if config.mlp == "swiglu" else 1
    results = 2 * q_width + 2 * kv_width + 2 * config.n_embd + first_products * config.ffn_size
    return stream + results * numbers.compute + config.n_head * numbers.wide


def _block_bytes(config: GPTConfig, numbers: NumberFormat) -> int:
    """Per token, what one block keeps without checkpointing."""
    q_width, kv_width = _widths(config)
    gated = config.mlp == "swiglu"
    copies = (3 + (2 if gated else 1)) if numbers.is_mixed else 2
    products = copies * config.n_embd + 2 * q_width + 2 * kv_width + (4 if gated else 2) * config.ffn_size
    statistics = 2 * _norm_statistics(config, numbers) + config.n_head * numbers.wide
    if config.qk_norm:
        products += q_width + kv_width
        statistics += (config.n_head + config.num_kv_heads) * _norm_statistics(config, numbers)
    return 2 * config.n_embd * numbers.weight + products * numbers.compute + statistics


def _norm_statistics(config: GPTConfig, numbers: NumberFormat) -> int:
    """Bytes per normed vector: mean and scale of a layer norm, the scale of an RMS norm."""
    return (2 if config.norm == "layernorm" else 1) * numbers.wide


def _widths(config: GPTConfig) -> tuple[int, int]:
    return config.n_head * config.head_size, config.num_kv_heads * config.head_size


def loss_bytes(config: GPTConfig, *, tokens: int, precision: str, chunk_size: int = LOSS_CHUNK) -> int:
    """What the chunked cross-entropy holds at its largest: at its own end, or when backward scales its gradients.

    The gradients of the hidden states and of the head exist from forward on. Besides there are, in forward, a chunk's
    logits (in 16 bits and once more in float32 for 16-bit factors) and the 16-bit copies of hidden states and head; in
    backward, a scaled copy of the head's gradient.

    Args:
        config: The architecture.
        tokens: In one microbatch of one rank.
        precision: One of :data:`NUMBER_FORMATS`.
        chunk_size: Tokens whose logits are held at once.
    """
    numbers = number_format(precision)
    head = config.padded_vocab_size * config.n_embd
    parts = 2 if config.z_loss > 0.0 else 1  # each sum has gradients of its own
    gradients = parts * (tokens * config.n_embd + head) * numbers.weight
    chunk = min(chunk_size, tokens) * config.vocab_size
    logits = chunk * numbers.compute + (chunk * numbers.wide if numbers.wide != numbers.compute else 0)
    casts = (tokens * config.n_embd + head) * numbers.compute if numbers.is_mixed else 0
    return gradients + max(logits + casts, head * numbers.weight)
