"""Every schedule equals one process in fp64: losses, the norm, every gradient, updated weights."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lit_pretrain.distributed.pipeline import Call, Pipeline, PipelineLayout, PipelineParts
from lit_pretrain.distributed.pipeline.engine import make_pair
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import SCHEDULES
from lit_pretrain.schedules.pipeline_actions import actions
from lit_pretrain.specs import ParallelPlan
from tests.support.pipelines import (
    Case,
    assert_equal,
    call_of,
    evaluated_alone,
    many_pipelined,
    one_process,
    pipelined,
    plan_of,
)


def compare(ranks, size, cases):
    outputs = ranks(size, many_pipelined, cases, init=True)
    for i, case in enumerate(cases):
        assert_equal([output[i] for output in outputs], one_process(case), case)
    return outputs


@pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied", marks=pytest.mark.slow), pytest.param(False, id="untied")]
)
def test_two_ranks_every_schedule_with_accumulation_documents_and_uneven_layers(ranks, tied):
    cases = [
        Case(schedule=name, tied=tied, accumulation=accumulation, layers=5, documents=True, llama=not tied)
        for name in SCHEDULES
        for accumulation in (1, 3)
    ]
    compare(ranks, 2, cases)


@pytest.mark.slow
def test_three_ranks_eight_layers_every_schedule(ranks):
    cases = [Case(schedule=name, tied=name != "1f1b", microbatches=8, layers=8) for name in SCHEDULES]
    compare(ranks, 3, [*cases, Case(schedule="1f1b", layers=8, microbatches=4, cut=(4, 4, 0), accumulation=3)])


def test_four_ranks_every_schedule(ranks):
    cases = [Case(schedule=name, microbatches=8, layers=8, tied=name != "zbv", llama=True) for name in SCHEDULES]
    compare(ranks, 4, [*cases, Case(schedule="looped_bfs", stages=3, layers=13, microbatches=4)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("tied", "llama"), [(True, True), (False, False)], ids=["tied llama", "untied gpt2"])
def test_whole_matrix(ranks, size, tied, llama):
    cases = [
        Case(
            schedule=name,
            tied=tied,
            llama=llama,
            microbatches=8,
            layers=8,
            accumulation=accumulation,
            checkpointing=checkpointing,
            updates=3,
        )
        for name in SCHEDULES
        for accumulation, checkpointing in ((1, "full"), (3, "none"))
    ]
    compare(ranks, size, cases)


def test_evaluation_between_batches_of_a_window_changes_no_gradient_and_takes_any_number_of_rows(ranks):
    cases = [Case(schedule=name, accumulation=2, evaluates=True) for name in SCHEDULES]
    outputs = compare(ranks, 2, cases)
    for i, case in enumerate(cases):
        (got,) = [output[i]["evaluated"] for output in outputs if output[i]["has_last"]]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(evaluated_alone(case)), rtol=1e-12, atol=0)


def test_stages_do_what_the_action_lists_say(ranks):
    cases = [
        Case(schedule=name, stages=stages, layers=8, updates=1, records=True)
        for name, own in SCHEDULES.items()
        for stages in ([own.stages_per_rank] if own.stages_per_rank else [1, 2])
    ]
    outputs = ranks(2, many_pipelined, cases, init=True)
    for i, case in enumerate(cases):
        for rank, output in enumerate(outputs):
            expected = actions(case.schedule, rank, ranks=2, microbatches=4, stages=case.stages)
            assert output[i]["order"] == [str(action) for action in expected], (case, rank)


def names_and_ties():
    """What this rank keeps, and whether a broken tie is seen."""
    case = Case(layers=4)
    model = case.model()
    plan = plan_of(model)
    layout = PipelineLayout.of(model, plan, schedule="1f1b", ranks=2, num_microbatches=4)
    parts = PipelineParts(model, plan, layout, rank=dist.get_rank())
    pipeline = Pipeline(
        parts, device=torch.device("cpu"), group=dist.group.WORLD, pair=make_pair([[0, 1]], last=layout.last_rank)
    )
    before = pipeline.ties.differ()
    with torch.no_grad():
        if dist.get_rank() == 1:
            pipeline.ties.last[0][3, 2] += 1e-15
    return list(model.state_dict()), before, pipeline.ties.differ()


def test_state_dict_keeps_global_names_and_a_broken_tie_is_noticed(ranks):
    first, last = ranks(2, names_and_ties, init=True)
    names = list(Case().model().state_dict())
    assert [n for n in names if n in first[0]] == first[0]
    assert set(first[0]) | set(last[0]) == set(names)
    assert set(first[0]) & set(last[0]) == {"wte.weight"}
    assert "blocks.1.mlp.up_proj.weight" in first[0]
    assert "blocks.2.mlp.up_proj.weight" in last[0]
    for _, before, after in (first, last):
        assert not before
        assert after


def refusals():
    """Messages of what cannot run."""
    case = Case(schedule="zbv", tied=False)
    model = case.model()
    plan = plan_of(model)
    layout = PipelineLayout.of(model, plan, schedule="zbv", ranks=2, num_microbatches=4)
    parts = PipelineParts(model, plan, layout, rank=dist.get_rank())
    out = []
    pipeline = Pipeline(parts, device=torch.device("cpu"), group=dist.group.WORLD)
    for call in (call_of(case.batch(0, rows=6)), Call((3,))):
        try:
            pipeline.train(call, lambda hidden, i: hidden.sum())
        except ConfigError as error:
            out.append(str(error))
    for block in parts.views[0].blocks.values():
        block.compile(backend="eager")
    try:
        Pipeline(parts, device=torch.device("cpu"), group=dist.group.WORLD)
    except ConfigError as error:
        out.append(str(error))
    return out


class Around(nn.Module):
    """Adds what enters a layer to what leaves it, outside of the layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def carried_around():
    model, plan = Around(), ParallelPlan(blocks="layers")
    layout = PipelineLayout.of(model, plan, schedule="gpipe", ranks=2, num_microbatches=2)
    parts = PipelineParts(model, plan, layout, rank=dist.get_rank())
    pipeline = Pipeline(parts, device=torch.device("cpu"), group=dist.group.WORLD)
    out = []
    for run in (pipeline.train, partial(pipeline.evaluate, microbatches=2)):
        try:
            run(Call((torch.ones(4, 3),)), lambda y, i: y.sum())
        except ConfigError as error:
            out.append(str(error))
    return out


def test_values_carried_around_layers_are_refused_on_every_rank(ranks):
    for messages in ranks(2, carried_around, init=True):
        assert len(messages) == 2
        assert all("carries values around its layers (such as x + layer(x)" in m for m in messages)


def test_what_cannot_run_is_refused_on_every_rank(ranks):
    for rows, nothing, compiled in ranks(2, refusals, init=True):
        assert "6 rows, which 4 microbatches cannot share; use a multiple of 4" in rows
        assert "without a tensor that has rows" in nothing
        assert "strategy.schedule=zbv computes input and weight gradients apart" in compiled
        assert "compile=false" in compiled


def one_stage():
    return pipelined(dataclasses.replace(Case(), schedule="1f1b")), pipelined(
        Case(schedule="looped_bfs", accumulation=3)
    )


def test_a_pipeline_of_one_rank(ranks):
    ((single, looped),) = ranks(1, one_stage, init=True)
    assert_equal([single], one_process(Case()), "one stage")
    assert_equal([looped], one_process(Case(accumulation=3)), "two stages on one rank")
