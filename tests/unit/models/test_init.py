"""Initial weights depend on names and the seed only."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_pretrain.models import GPT, init_weights
from lit_pretrain.models.init import initial_value
from lit_pretrain.specs import GPTConfig

GPT2: dict[str, Any] = {"vocab_size": 200, "block_size": 64, "n_layer": 8, "n_head": 4, "n_embd": 64}
LLAMA = GPT2 | {
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "qk_norm": True,
    "tie_embeddings": False,
}
FAMILIES = pytest.mark.parametrize("kwargs", [GPT2, LLAMA], ids=["gpt2", "llama"])


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_built_on_meta_gets_the_same_weights(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    config = GPTConfig(**kwargs)
    expected = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())
    model = model.to_empty(device="cpu").to(dtype)
    init_weights(model, seed=0)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(dtype)), name
    ids = torch.arange(64)[None]
    assert torch.equal(model(ids), expected.to(dtype)(ids))


def test_tied_embeddings_are_one_tensor_after_meta() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**GPT2))
    model.to_empty(device="cpu")
    assert model.unembedding is model.wte.weight
    assert "head.weight" not in model.state_dict()


@FAMILIES
def test_building_leaves_the_global_generator_alone(kwargs: dict[str, Any]) -> None:
    before = torch.random.get_rng_state()
    GPT(GPTConfig(**kwargs))
    assert torch.equal(torch.random.get_rng_state(), before)


@FAMILIES
def test_a_part_of_a_model_gets_the_weights_of_the_whole(kwargs: dict[str, Any]) -> None:
    whole = GPT(GPTConfig(**kwargs)).state_dict()
    part = GPT(GPTConfig(**kwargs))
    for key in ("0", "1", "5"):
        del part.blocks[key]
    for parameter in part.parameters():
        nn.init.constant_(parameter, 7.0)
    init_weights(part, seed=0)
    for name, value in part.state_dict().items():
        assert torch.equal(whole[name], value), name


def test_seeds_and_names_draw_different_weights() -> None:
    config = GPTConfig(**GPT2)
    first, second = GPT(config), GPT(config)
    init_weights(second, seed=1)
    assert not torch.equal(first.wte.weight, second.wte.weight)
    q, k = (first.get_parameter(f"blocks.0.attn.{name}.weight") for name in ("q_proj", "k_proj"))
    assert q.shape == k.shape
    assert abs(torch.corrcoef(torch.stack((q.flatten(), k.flatten())))[0, 1]) < 0.1


@FAMILIES
def test_the_table(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**(kwargs | {"init_std": 0.1})))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            values = parameter[:200] if name in ("wte.weight", "head.weight") else parameter
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.1 / math.sqrt(16) if residual else 0.1
            # Relative error of a standard deviation of n values: 1/sqrt(2n); four of them.
            slack = 4 / math.sqrt(2 * values.numel())
            assert values.std().item() == pytest.approx(std, rel=slack), name
            assert abs(values.mean().item()) < 4 * std / math.sqrt(values.numel()), name
    assert torch.equal(model.unembedding[200:], torch.zeros(56, 64))


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    model = GPT(GPTConfig(**GPT2))
    ids = torch.randint(200, (4, 64), generator=torch.Generator().manual_seed(0))
    sums = model.loss(model(ids[:, :-1]), ids[:, 1:])
    # Logits have standard deviation 0.02 sqrt(64) = 0.16, which adds about 0.16^2/2 nats.
    assert (sums.nll_sum / sums.num_targets).item() == pytest.approx(math.log(200), abs=0.05)


def test_a_name_without_a_rule_is_our_own_bug() -> None:
    with pytest.raises(LookupError, match="scale"):
        initial_value("blocks.0.scale", (2,), GPTConfig(**GPT2), seed=0)


@pytest.fixture
def mesh_2x2() -> Iterator[Any]:
    """A mesh of four ranks of which this process is rank 3 and the others do not exist."""
    before = dict(os.environ)
    dist.init_process_group(backend="fake", rank=3, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def test_every_rank_cuts_its_shard_from_the_same_weights(mesh_2x2: Any) -> None:
    config = GPTConfig(**GPT2)
    whole = GPT(config).state_dict()
    with torch.device("meta"):
        model = GPT(config)
    layouts = {
        "blocks.0.attn.q_proj.weight": (Shard(0), Shard(1)),
        "blocks.0.mlp.up_proj.weight": (Shard(0), Shard(0)),
        "blocks.1.mlp.up_proj.bias": (Replicate(), Shard(0)),
        "wte.weight": (Shard(0), Replicate()),
    }
    for name, placements in layouts.items():
        owner, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        sharded = distribute_tensor(parameter.detach(), mesh_2x2, placements, src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    # Rank 3 stands at (1, 1): the second half along each axis that shards.
    expected = {
        "blocks.0.attn.q_proj.weight": whole["blocks.0.attn.q_proj.weight"][32:, 32:],
        "blocks.0.mlp.up_proj.weight": whole["blocks.0.mlp.up_proj.weight"][192:],
        "blocks.1.mlp.up_proj.bias": whole["blocks.1.mlp.up_proj.bias"][128:],
        "wte.weight": whole["wte.weight"][128:],
    }
    for name, parameter in model.named_parameters():
        if name in layouts:
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), expected[name]), name
        else:
            assert torch.equal(parameter, whole[name]), name
