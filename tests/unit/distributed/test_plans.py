from __future__ import annotations

import pytest
from torch import nn

from lit_pretrain.distributed.layout import find_units
from lit_pretrain.distributed.plans import find_plan
from lit_pretrain.distributed.tensor_parallel import matches
from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT
from lit_pretrain.specs import GPTConfig, ParallelPlan


def gpt(**changes):
    shape = {"vocab_size": 61, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 8}
    return GPT(GPTConfig(**{**shape, **changes}))


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("blocks.3.attn", "blocks.*.attn", True),
        ("blocks.3.attn.q_proj", "blocks.*.attn", False),
        ("blocks.3", "blocks.*", True),
        ("blocks.3.mlp", "blocks.*", False),
        ("wte", "wte", True),
        ("model.wte", "wte", False),
    ],
)
def test_a_star_stands_within_one_part(name, pattern, fits):
    assert matches(name, pattern) == fits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "qk_norm": True, "mlp": "swiglu", "norm": "rmsnorm", "bias": False},
        {"position": "rope"},
    ],
)
def test_the_plan_of_a_gpt_names_every_parameter_once(changes):
    model = gpt(**changes)
    plan = model.parallel_plan
    for pattern in plan.tensor_parallel:
        assert any(matches(name, pattern) for name, _ in model.named_modules()), pattern
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        assert sum(matches(owner, pattern) for pattern in plan.tensor_parallel) == 1, name
    stages = {*plan.embed, *plan.head, plan.blocks}
    assert {name for name, _ in model.named_children()} == stages


def test_names_are_those_of_the_whole_module():
    whole = nn.Module()
    whole.inner = nn.Module()
    whole.inner.model = gpt()
    plan = find_plan(whole)
    assert plan.units == ("inner.model.blocks.*",)
    assert plan.blocks == "inner.model.blocks"
    assert plan.tensor_parallel["inner.model.blocks.*.mlp.up_proj"] == "column"
    assert [name for name, _ in find_units(whole, plan.units)] == ["inner.model.blocks.0", "inner.model.blocks.1"]


def test_a_plan_of_the_users_own_wins():
    own = ParallelPlan(units=("wte",))
    assert find_plan(gpt(), own) is own
    carrier = nn.Sequential(nn.Linear(2, 2))
    carrier.parallel_plan = own
    assert find_plan(carrier) == own
    carrier.parallel_plan = "zero3"
    with pytest.raises(ConfigError, match=r"Sequential.parallel_plan must be a ParallelPlan, not 'zero3'"):
        find_plan(carrier)


def test_without_a_plan_repeated_layers_are_units():
    module = nn.Module()
    module.body = nn.ModuleList(
        nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Linear(1, 1) for _ in range(2))) for _ in range(3)
    )
    module.mixed = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    module.empty = nn.ModuleList(nn.ReLU() for _ in range(2))
    module.single = nn.ModuleList([nn.Linear(2, 2)])
    assert find_plan(module).units == ("body.*",)
    assert not find_plan(module).tensor_parallel


def test_a_unit_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="'layers"):
        find_units(gpt(), ("layers.*",))


def test_inner_units_come_before_outer_ones():
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert [name for name, _ in find_units(module, ("*", "*.*"))] == ["0.0", "0", "1"]
