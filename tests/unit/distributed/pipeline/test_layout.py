import pytest
import torch
from torch import nn

from lit_pretrain.distributed.pipeline import PipelineLayout
from lit_pretrain.distributed.pipeline.layout import costs
from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT
from lit_pretrain.specs import GPTConfig, ParallelPlan

PLAN = ParallelPlan(embed=("wte", "wpe"), blocks="blocks", head=("norm", "wte"))


def gpt(**changes):
    sizes = {"vocab_size": 640, "block_size": 8, "n_layer": 6, "n_head": 2, "n_embd": 16} | changes
    with torch.device("meta"):
        return GPT(GPTConfig(**sizes))


def test_work_is_told_from_weights_that_are_multiplied():
    # A block multiplies 12 C^2 = 3072 weights, the tied head 640 x 16 = 10240; embeddings are looked up.
    assert costs(gpt(), PLAN) == (0.0, 10240 / 3072)


def test_the_head_takes_the_place_of_layers():
    layout = PipelineLayout.of(gpt(), PLAN, schedule="1f1b", ranks=3)
    assert layout.counts == (2, 3, 1)  # work 2, 3 and 4.33: the head alone is dearest
    assert layout.num_microbatches == 12
    assert [list(layout.layers_of(s)) for s in range(3)] == [[0, 1], [2, 3, 4], [5]]
    assert (layout.num_stages, layout.stages_per_rank, layout.last_rank) == (3, 1, 2)


def test_a_v_ends_where_it_began():
    layout = PipelineLayout.of(gpt(n_layer=8), PLAN, schedule="zbv", ranks=2, num_microbatches=4, cut=[2, 2, 2, 2])
    assert (layout.last_rank, layout.stages_of(0), layout.stages_of(1)) == (0, [0, 3], [1, 2])
    assert layout.splits_backward


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="names no blocks"):
        PipelineLayout.of(gpt(), ParallelPlan(), schedule="gpipe", ranks=2)
    with pytest.raises(ConfigError, match="names 'layers', but GPT has no such module; it has wte, wpe, blocks, norm"):
        PipelineLayout.of(gpt(), ParallelPlan(blocks="layers"), schedule="gpipe", ranks=2)
    with pytest.raises(ConfigError, match="at least 8 layers, but the model has 6"):
        PipelineLayout.of(gpt(), PLAN, schedule="zbv", ranks=4, num_microbatches=8)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_recomputation_that_a_split_backward_does_not_survive_is_refused(schedule):
    sizes = GPTConfig(vocab_size=640, block_size=8, n_layer=8, n_head=2, n_embd=16)
    for mode in ("none", "full", "selective"):
        model = GPT(sizes, activation_checkpointing=mode)
        PipelineLayout.of(model, PLAN, schedule="1f1b", ranks=2)
        if mode != "selective":
            PipelineLayout.of(model, PLAN, schedule=schedule, ranks=2)
            continue
        with pytest.raises(ConfigError, match=rf"^strategy.schedule={schedule} .*=selective does not allow; use full"):
            PipelineLayout.of(model, PLAN, schedule=schedule, ranks=2)


def test_blocks_may_be_the_model_itself():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
    layout = PipelineLayout.of(model, ParallelPlan(blocks=""), schedule="gpipe", ranks=2)
    assert layout.counts == (2, 3)
