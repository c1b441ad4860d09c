"""Which parameters are decayed, and what AdamW does with them."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT
from lit_pretrain.optim import adamw, parameter_groups
from lit_pretrain.specs import GPTConfig

CONFIG = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=8)


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_id[id(parameter)] for parameter in group["params"]}


def test_matrices_and_embeddings_are_decayed_and_nothing_else() -> None:
    model = GPT(CONFIG)
    decay, no_decay = parameter_groups(model, weight_decay=0.1)
    assert (decay["name"], decay["weight_decay"]) == ("decay", 0.1)
    assert (no_decay["name"], no_decay["weight_decay"]) == ("no_decay", 0.0)
    attn, mlp = "blocks.0.attn.", "blocks.0.mlp."
    matrices = {"wte.weight", "wpe.weight", mlp + "up_proj.weight", mlp + "down_proj.weight"}
    matrices |= {f"{attn}{x}_proj.weight" for x in "qkvo"}
    assert names(model, decay) == matrices
    assert names(model, no_decay) == {name for name, _ in model.named_parameters()} - matrices


def test_a_tied_weight_appears_once_and_a_frozen_one_not_at_all() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(4, 3), "head": nn.Linear(3, 4), "frozen": nn.Linear(3, 3)})
    model["head"].weight = model["wte"].weight
    model["frozen"].requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1)
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [[(4, 3)], [(4,)]]


def test_an_empty_group_is_left_out() -> None:
    assert [g["name"] for g in parameter_groups(nn.Linear(2, 2, bias=False), weight_decay=0.1)] == ["decay"]
    assert [g["name"] for g in parameter_groups(nn.LayerNorm(2), weight_decay=0.1)] == ["no_decay"]


@pytest.mark.parametrize("fused", [None, False, True])
def test_two_updates_by_hand(fused: bool | None) -> None:
    model = nn.Linear(1, 1).double()
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 3.0)
    lr, decay, (b1, b2), eps = 0.1, 0.5, (0.8, 0.9), 1e-3
    optimizer = adamw(model, lr=lr, betas=[b1, b2], eps=eps, weight_decay=decay, fused=fused)
    w, b = 2.0, 3.0
    m = v = 0.0
    for step, gradient in enumerate((0.3, -0.2), start=1):
        model.weight.grad = torch.full_like(model.weight, gradient)
        model.bias.grad = torch.full_like(model.bias, gradient)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        move = lr * (m / (1 - b1**step)) / (math.sqrt(v / (1 - b2**step)) + eps)
        w, b = w * (1 - lr * decay) - move, b - move
    assert model.weight.item() == pytest.approx(w, rel=1e-12)
    assert model.bias.item() == pytest.approx(b, rel=1e-12)


def test_fused_where_torch_has_it() -> None:
    assert adamw(nn.Linear(2, 2)).param_groups[0]["fused"] is True
    assert not adamw(nn.Linear(2, 2), fused=False).param_groups[0]["fused"]
    with torch.device("meta"):
        assert not adamw(nn.Linear(2, 2)).param_groups[0]["fused"]


def test_fused_where_torch_has_none_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=r"fused=true.*float32 on meta.*fused=null"):
        adamw(nn.Linear(2, 2), fused=True)


def test_defaults_are_those_of_pretraining() -> None:
    optimizer = functools.partial(adamw, lr=1e-3)(GPT(CONFIG))
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 1e-8, 0.1)
    assert [g["name"] for g in optimizer.param_groups] == ["decay", "no_decay"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": math.inf}, "weight_decay=inf"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\[0.9, 1.0\]"),
        ({"betas": (0.9,)}, r"betas=\[0.9\]"),
    ],
    ids=str,
)
def test_bad_values_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adamw(nn.Linear(2, 2), **kwargs)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="without trainable parameters"):
        adamw(nn.Linear(2, 2).requires_grad_(False))


def test_one_update_lowers_the_loss() -> None:
    model = GPT(CONFIG)
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    optimizer = adamw(model, lr=1e-3)

    def loss() -> Tensor:
        return model.loss(model(ids), ids).nll_sum

    before = loss()
    before.backward()
    optimizer.step()
    assert loss() < before
