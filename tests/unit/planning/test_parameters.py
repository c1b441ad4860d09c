"""Closed forms against published figures, against the real model on the meta device, and by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_pretrain.models import GPT
from lit_pretrain.planning import count_parameters
from lit_pretrain.specs import GPTConfig, RopeScaling

PRESETS = Path(__file__).parents[3] / "conf" / "model"


def preset(name: str) -> GPTConfig:
    own = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    assert own.pop("defaults") == ["gpt", "_self_"]
    kwargs: dict[str, Any] = yaml.safe_load((PRESETS / "gpt.yaml").read_text()) | own
    assert kwargs.pop("_target_") == "lit_pretrain.specs.GPTConfig"
    scaling = kwargs.pop("rope_scaling", None)
    if scaling is not None:
        assert scaling.pop("_target_") == "lit_pretrain.specs.RopeScaling"
        kwargs["rope_scaling"] = RopeScaling(**scaling)
    return GPTConfig(**kwargs)


# Sizes of the released checkpoints.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
}
ROUNDED = {"gpt3-175b": 174.6e9, "gpt-1m": 1e6, "llama-1m": 1e6}


def on_meta(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters(name: str) -> None:
    count = count_parameters(preset(name))
    assert count.total - count.padding == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_presets_have_about_the_published_size(name: str) -> None:
    assert count_parameters(preset(name)).total == pytest.approx(ROUNDED[name], rel=0.1 if "1m" in name else 5e-3)


def test_chinchilla_is_short_of_its_relative_positions_only() -> None:
    total = count_parameters(preset("chinchilla-70b")).total
    assert total + 80 * 8192**2 == pytest.approx(70e9, rel=5e-3)


@pytest.mark.parametrize(
    "path", sorted(set(PRESETS.glob("*.yaml")) - {PRESETS / "gpt.yaml"}), ids=lambda path: path.stem
)
def test_the_closed_form_counts_the_real_model(path: Path) -> None:
    config = preset(path.stem)
    assert count_parameters(config).total == on_meta(config)


@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 2, "qk_norm": True}, {"head_dim": 6, "ffn_hidden_size": 50}])
@pytest.mark.parametrize(
    "kind",
    list(
        itertools.product(
            ("learned", "rope"), ("layernorm", "rmsnorm"), ("gelu", "swiglu"), (True, False), (True, False)
        )
    ),
)
def test_every_kind_of_model(shape: dict[str, Any], kind: tuple[Any, ...]) -> None:
    kwargs = dict(zip(("position", "norm", "mlp", "bias", "tie_embeddings"), kind, strict=True))
    config = GPTConfig(vocab_size=100, block_size=9, n_layer=3, n_head=4, n_embd=32, **kwargs, **shape)
    assert count_parameters(config).total == on_meta(config)


def test_a_count_by_hand() -> None:
    # Width 4, two heads, one layer, vocabulary 10 padded to 16, 8 positions.
    count = count_parameters(GPTConfig(vocab_size=10, block_size=8, n_layer=1, n_head=2, n_embd=4, vocab_multiple=16))
    assert count.token_embedding == 40
    assert count.padding == 24
    assert count.position_embedding == 32
    assert count.head == 0
    # Four 4x4 projections, 4x16 and 16x4; biases 4+4+4+4+16+4; two norms of 8.
    assert count.blocks == count.block == 64 + 128 + 36 + 16
    assert count.final_norm == 8
    assert count.embedding == 96
    assert count.non_embedding == 252
    assert count.total == 348
