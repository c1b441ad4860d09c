"""Weights to and from the names and layouts of Hugging Face's GPT-2 and LLaMA, without importing ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_pretrain.errors import ConfigError
from lit_pretrain.models.gpt import GPT
from lit_pretrain.specs import GPTConfig

Family = Literal["gpt2", "llama"]

# Buffers that older files carry; they hold no weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class _Entry(NamedTuple):
    """One of our parameters and where it is kept over there.

    GPT-2's linear layers are stored transposed, (in, out), and its queries, keys and values side by side: ``part`` is
    the third of the output that belongs to us.
    """

    ours: str
    theirs: str
    transposed: bool = False
    part: int | None = None
    vocabulary: bool = False


def family(config: GPTConfig) -> Family:
    """The Hugging Face family that can hold this architecture.

    Args:
        config: The architecture.

    Raises:
        ConfigError: Neither GPT-2 nor LLaMA can.
    """
    if config.qk_norm:
        raise ConfigError("model.qk_norm=true has no place in Hugging Face's GPT-2 or LLaMA; use model.qk_norm=false.")
    if config.position == "rope" and config.norm == "rmsnorm" and config.mlp == "swiglu":
        return "llama"
    plain_heads = config.num_kv_heads == config.n_head and config.n_head * config.head_size == config.n_embd
    if config.position == "learned" and config.norm == "layernorm" and config.mlp != "swiglu" and plain_heads:
        if not config.bias:
            raise ConfigError("model.bias=false has no place in Hugging Face's GPT-2; use model.bias=true.")
        return "gpt2"
    raise ConfigError(
        f"model.position={config.position}, norm={config.norm}, mlp={config.mlp}, n_kv_head={config.num_kv_heads} of "
        f"{config.n_head} heads is neither GPT-2 (learned, layernorm, gelu, equal heads) nor LLaMA (rope, rmsnorm, "
        f"swiglu); use one of these."
    )


def _gpt2(config: GPTConfig) -> Iterator[_Entry]:
    yield _Entry("wte.weight", "transformer.wte.weight", vocabulary=True)
    yield _Entry("wpe.weight", "transformer.wpe.weight")
    for i in range(config.n_layer):
        mine, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            transposed = kind == "weight"
            yield _Entry(f"{mine}.attn_norm.{kind}", f"{theirs}.ln_1.{kind}")
            for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                yield _Entry(f"{mine}.attn.{name}.{kind}", f"{theirs}.attn.c_attn.{kind}", transposed, part)
            yield _Entry(f"{mine}.attn.o_proj.{kind}", f"{theirs}.attn.c_proj.{kind}", transposed)
            yield _Entry(f"{mine}.mlp_norm.{kind}", f"{theirs}.ln_2.{kind}")
            yield _Entry(f"{mine}.mlp.up_proj.{kind}", f"{theirs}.mlp.c_fc.{kind}", transposed)
            yield _Entry(f"{mine}.mlp.down_proj.{kind}", f"{theirs}.mlp.c_proj.{kind}", transposed)
    yield _Entry("norm.weight", "transformer.ln_f.weight")
    yield _Entry("norm.bias", "transformer.ln_f.bias")


def _llama(config: GPTConfig) -> Iterator[_Entry]:
    yield _Entry("wte.weight", "model.embed_tokens.weight", vocabulary=True)
    for i in range(config.n_layer):
        mine, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield _Entry(f"{mine}.attn_norm.weight", f"{theirs}.input_layernorm.weight")
        yield _Entry(f"{mine}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        for kind in ("weight", "bias") if config.bias else ("weight",):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield _Entry(f"{mine}.attn.{name}.{kind}", f"{theirs}.self_attn.{name}.{kind}")
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield _Entry(f"{mine}.mlp.{name}.{kind}", f"{theirs}.mlp.{name}.{kind}")
    yield _Entry("norm.weight", "model.norm.weight")


def _entries(config: GPTConfig) -> list[_Entry]:
    entries = list(_gpt2(config) if family(config) == "gpt2" else _llama(config))
    if not config.tie_embeddings:
        entries.append(_Entry("head.weight", "lm_head.weight", vocabulary=True))
    return entries


def _our_shapes(config: GPTConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: value.shape for name, value in GPT(config).state_dict().items()}


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """A state dict for ``GPT(config)`` from one of ``GPT2LMHeadModel`` or ``LlamaForCausalLM``.

    Rotary queries and keys are taken as they are: both sides pair feature ``i`` with ``i + D/2``.

    Args:
        state: Hugging Face's state dict.
        config: The architecture; the vocabulary is padded with zero rows as it asks.

    Raises:
        ConfigError: A weight is missing, has another shape, or is left over.
    """
    shapes = _our_shapes(config)
    out: dict[str, Tensor] = {}
    entries = _entries(config)
    for entry in entries:
        if entry.theirs not in state:
            raise ConfigError(f"The state dict has no {entry.theirs!r}; check model.n_layer and the architecture.")
        value = state[entry.theirs]
        if entry.transposed:
            value = value.t()
        if entry.part is not None:
            value = value.chunk(3, dim=0)[entry.part]
        if entry.vocabulary and value.shape[0] == config.vocab_size:
            padding = value.new_zeros(config.padded_vocab_size - config.vocab_size, value.shape[1])
            value = torch.cat((value, padding))
        if value.shape != shapes[entry.ours]:
            raise ConfigError(
                f"{entry.theirs} gives {tuple(value.shape)} for {entry.ours}, which the configuration makes "
                f"{tuple(shapes[entry.ours])}; set the model's sizes as in the file."
            )
        out[entry.ours] = value.contiguous()
    known = {entry.theirs for entry in entries}
    if config.tie_embeddings:
        known.add("lm_head.weight")
    left = sorted(name for name in state if name not in known and not name.endswith(_BUFFERS))
    if left:
        raise ConfigError(f"The state dict holds weights this architecture has no place for, such as {left[0]!r}.")
    return out


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """A state dict for ``GPT2LMHeadModel`` or ``LlamaForCausalLM`` from one of ``GPT(config)``.

    Rows of vocabulary padding are dropped. With tied embeddings the head is given too, as Hugging Face has it.

    Args:
        state: The state dict of ``GPT(config)``.
        config: The architecture.

    Raises:
        ConfigError: A weight is missing, or Hugging Face has no such architecture.
    """
    out: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for entry in _entries(config):
        if entry.ours not in state:
            raise ConfigError(f"The state dict has no {entry.ours!r}; give that of the whole model.")
        value = state[entry.ours]
        if entry.vocabulary:
            value = value[: config.vocab_size]
        if entry.transposed:
            value = value.t()
        if entry.part is None:
            out[entry.theirs] = value.contiguous()
        else:
            parts.setdefault(entry.theirs, []).append(value)
    for name, values in parts.items():
        out[name] = torch.cat(values, dim=-1)
    if config.tie_embeddings:
        embedding = "transformer.wte.weight" if family(config) == "gpt2" else "model.embed_tokens.weight"
        out["lm_head.weight"] = out[embedding]
    return out
