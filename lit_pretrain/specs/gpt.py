"""The architecture of a GPT as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_pretrain.errors import ConfigError

Position = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
MLP = Literal["gelu", "gelu_tanh", "swiglu"]


def _choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"model.{name}={value!r} is unknown; use one of {', '.join(known)}.")


def _whole(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"model.{name}={value!r} must be a whole number of at least {least}.")


def _number(
    name: str, value: object, *, above: float | None = None, least: float = 0.0, below: float = math.inf
) -> None:
    number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    low_enough = number < below  # False for NaN and infinity
    if low_enough and (number >= least if above is None else number > above):
        return
    rule = f"of at least {least:g}" if above is None else f"above {above:g}"
    limit = "" if below == math.inf else f" and below {below:g}"
    raise ConfigError(f"model.{name}={value!r} must be a finite number {rule}{limit}.")


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was trained on.

    Args:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` leaves wavelengths shorter than
            ``original_block_size / high_freq_factor`` alone, divides those longer than
            ``original_block_size / low_freq_factor`` by ``factor``, and interpolates in between.
        factor: Stretch, at least 1.
        low_freq_factor: ``llama3`` only.
        high_freq_factor: ``llama3`` only; above ``low_freq_factor``.
        original_block_size: ``llama3`` only; context length before stretching, in tokens.

    Source: Chen et al. 2023 (linear position interpolation); Llama 3.1 model card (llama3).
    """

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_block_size: int = 8192

    def __post_init__(self) -> None:
        _choice("rope_scaling.kind", self.kind, ("linear", "llama3"))
        _number("rope_scaling.factor", self.factor, least=1.0)
        _number("rope_scaling.low_freq_factor", self.low_freq_factor, above=0.0)
        _number("rope_scaling.high_freq_factor", self.high_freq_factor, above=0.0)
        _whole("rope_scaling.original_block_size", self.original_block_size)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}."
            )


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder-only transformer: the GPT-2 family, the LLaMA family, and what lies between.

    Args:
        vocab_size: Token ids run from 0 to ``vocab_size - 1``.
        block_size: Longest sequence, in tokens.
        n_layer: Transformer blocks.
        n_head: Query heads.
        n_kv_head: Key and value heads (grouped-query attention); None means ``n_head``.
        n_embd: Width of the residual stream.
        head_dim: Width of a head; None means ``n_embd / n_head``.
        ffn_hidden_size: Width of the MLP; None means ``4 n_embd``, or ``8/3 n_embd`` rounded up to a multiple of 256
            for ``swiglu`` (LLaMA: 11008 at 4096).
        position: ``learned`` (GPT-2) or ``rope`` (LLaMA; the half-split layout of Hugging Face).
        rope_base: Base of the rotary frequencies.
        rope_scaling: Stretch of the rotary frequencies, or None.
        norm: ``layernorm`` or ``rmsnorm``.
        norm_eps: Added to the variance.
        mlp: ``gelu`` (exact), ``gelu_tanh`` (GPT-2) or ``swiglu``.
        bias: Biases in linear layers and layer norms.
        qk_norm: Normalise queries and keys per head before the rotation.
        tie_embeddings: The head shares the token embedding's weight.
        dropout: Probability, on embeddings, attention weights and both residual branches.
        z_loss: Weight of the mean squared log-partition added to the training loss (PaLM uses 1e-4).
        vocab_multiple: Rows of embedding and head are padded up to a multiple of this; padding is never sampled
            and never trained.
        init_std: Standard deviation of initial weights; None means 0.02. Projections into the residual stream get
            ``init_std / sqrt(2 n_layer)`` (GPT-2, section 2.3).
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_kv_head: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    position: Position = "learned"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    mlp: MLP = "gelu_tanh"
    bias: bool = True
    qk_norm: bool = False
    tie_embeddings: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    vocab_multiple: int = 64
    init_std: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "vocab_multiple"):
            _whole(name, getattr(self, name))
        for name in ("n_kv_head", "head_dim", "ffn_hidden_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        _choice("position", self.position, ("learned", "rope"))
        _choice("norm", self.norm, ("layernorm", "rmsnorm"))
        _choice("mlp", self.mlp, ("gelu", "gelu_tanh", "swiglu"))
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ConfigError(
                f"model.n_head={self.n_head} must divide model.n_embd={self.n_embd}; use one of "
                f"{_divisors(self.n_embd)}, or set model.head_dim."
            )
        if self.n_head % self.num_kv_heads:
            raise ConfigError(
                f"model.n_kv_head={self.n_kv_head} must divide model.n_head={self.n_head}; use one of "
                f"{_divisors(self.n_head)}."
            )
        if self.position == "rope" and self.head_size % 2:
            raise ConfigError(f"model.position=rope needs an even head size, not {self.head_size}; set model.head_dim.")
        if self.rope_scaling is not None and self.position != "rope":
            raise ConfigError("model.rope_scaling is set but model.position=learned; use model.position=rope.")
        _number("dropout", self.dropout, below=1.0)
        _number("z_loss", self.z_loss)
        _number("norm_eps", self.norm_eps, above=0.0)
        _number("rope_base", self.rope_base, above=0.0)
        if self.init_std is not None:
            _number("init_std", self.init_std, above=0.0)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim if self.head_dim is not None else self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_head if self.n_kv_head is not None else self.n_head

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.mlp == "swiglu":
            return -(-8 * self.n_embd // (3 * 256)) * 256
        return 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
