"""GPTConfig: every rule has its sentence, every derived size its published number."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import GPTConfig, RopeScaling


def config(**changes):
    sizes = {"vocab_size": 100, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPTConfig(**{**sizes, **changes})


@pytest.mark.parametrize("name", ["vocab_size", "block_size", "n_layer", "n_head", "n_embd", "vocab_multiple"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_sizes_are_whole_numbers(name, value):
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert str(caught.value) == f"model.{name}={value!r} must be a whole number of at least 1."


@pytest.mark.parametrize("name", ["n_kv_head", "head_dim", "ffn_hidden_size"])
@pytest.mark.parametrize("value", [0, -4, 8.0, False])
def test_optional_sizes_are_whole_numbers(name, value):
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert str(caught.value) == f"model.{name}={value!r} must be a whole number of at least 1."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "alibi"}, "model.position='alibi' is unknown; use one of learned, rope."),
        ({"norm": "batch"}, "model.norm='batch' is unknown; use one of layernorm, rmsnorm."),
        ({"mlp": "relu"}, "model.mlp='relu' is unknown; use one of gelu, gelu_tanh, swiglu."),
        (
            {"n_head": 3},
            "model.n_head=3 must divide model.n_embd=32; use one of 1, 2, 4, 8, 16, 32, or set model.head_dim.",
        ),
        ({"n_kv_head": 3}, "model.n_kv_head=3 must divide model.n_head=4; use one of 1, 2, 4."),
        ({"n_kv_head": 8}, "model.n_kv_head=8 must divide model.n_head=4; use one of 1, 2, 4."),
        (
            {"position": "rope", "head_dim": 5},
            "model.position=rope needs an even head size, not 5; set model.head_dim.",
        ),
        (
            {"rope_scaling": RopeScaling(factor=2.0)},
            "model.rope_scaling is set but model.position=learned; use model.position=rope.",
        ),
        ({"dropout": 1.0}, "model.dropout=1.0 must be a finite number of at least 0 and below 1."),
        ({"dropout": -0.1}, "model.dropout=-0.1 must be a finite number of at least 0 and below 1."),
        ({"dropout": float("nan")}, "model.dropout=nan must be a finite number of at least 0 and below 1."),
        ({"z_loss": -1e-4}, "model.z_loss=-0.0001 must be a finite number of at least 0."),
        ({"z_loss": float("nan")}, "model.z_loss=nan must be a finite number of at least 0."),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be a finite number above 0."),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan must be a finite number above 0."),
        ({"rope_base": -1.0}, "model.rope_base=-1.0 must be a finite number above 0."),
        ({"rope_base": float("inf")}, "model.rope_base=inf must be a finite number above 0."),
        ({"dropout": "0.1"}, "model.dropout='0.1' must be a finite number of at least 0 and below 1."),
        ({"init_std": 0.0}, "model.init_std=0.0 must be a finite number above 0."),
    ],
)
def test_rules(changes, message):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "yarn"}, "model.rope_scaling.kind='yarn' is unknown; use one of linear, llama3."),
        ({"factor": 0.5}, "model.rope_scaling.factor=0.5 must be a finite number of at least 1."),
        ({"factor": float("nan")}, "model.rope_scaling.factor=nan must be a finite number of at least 1."),
        (
            {"kind": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "model.rope_scaling.high_freq_factor=4.0 must be above low_freq_factor=4.0.",
        ),
        (
            {"kind": "llama3", "original_block_size": 0},
            "model.rope_scaling.original_block_size=0 must be a whole number of at least 1.",
        ),
        (
            {"kind": "llama3", "low_freq_factor": 0.0},
            "model.rope_scaling.low_freq_factor=0.0 must be a finite number above 0.",
        ),
    ],
)
def test_rope_scaling_rules(changes, message):
    with pytest.raises(ConfigError) as caught:
        RopeScaling(**changes)
    assert str(caught.value) == message


def test_a_head_may_have_a_width_of_its_own():
    c = config(n_head=3, head_dim=10)
    assert (c.head_size, c.num_kv_heads) == (10, 3)


@pytest.mark.parametrize(
    ("sizes", "head_size", "num_kv_heads", "ffn_size", "padded_vocab_size"),
    [
        # GPT-2 124M: 64-wide heads, MLP of 4 x 768; 50257 rows padded to 786 x 64.
        ({"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}, 64, 12, 3072, 50304),
        # LLaMA-1 and 2 (Touvron et al. 2023): 11008 at 4096, 13824 at 5120, 22016 at 8192 (65B).
        ({"vocab_size": 32000, "n_layer": 32, "n_head": 32, "n_embd": 4096, "mlp": "swiglu"}, 128, 32, 11008, 32000),
        ({"vocab_size": 32000, "n_layer": 40, "n_head": 40, "n_embd": 5120, "mlp": "swiglu"}, 128, 40, 13824, 32000),
        ({"vocab_size": 32000, "n_layer": 80, "n_head": 64, "n_embd": 8192, "mlp": "swiglu"}, 128, 64, 22016, 32000),
        # LLaMA-2 70B: 8 kv heads, MLP given.
        (
            {
                "vocab_size": 32000,
                "n_layer": 80,
                "n_head": 64,
                "n_kv_head": 8,
                "n_embd": 8192,
                "mlp": "swiglu",
                "ffn_hidden_size": 28672,
            },
            128,
            8,
            28672,
            32000,
        ),
        ({"vocab_size": 65, "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_multiple": 1}, 8, 1, 32, 65),
    ],
)
def test_derived_sizes(sizes, head_size, num_kv_heads, ffn_size, padded_vocab_size):
    c = GPTConfig(block_size=1024, **sizes)
    assert (c.head_size, c.num_kv_heads) == (head_size, num_kv_heads)
    assert (c.ffn_size, c.padded_vocab_size) == (ffn_size, padded_vocab_size)


def test_it_is_a_value():
    first = config(position="rope", rope_scaling=RopeScaling(kind="llama3", factor=8.0))
    second = config(position="rope", rope_scaling=RopeScaling(kind="llama3", factor=8.0))
    assert first == second
    assert len({first, second, config()}) == 2
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.n_layer = 3
    with pytest.raises(ConfigError, match="n_head=5 must divide"):
        dataclasses.replace(first, n_head=5, n_kv_head=None)
    with pytest.raises(TypeError):
        GPTConfig(100, 16, 2, 4, 32)  # keyword-only: sizes are easy to swap
