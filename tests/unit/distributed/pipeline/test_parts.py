import pytest
import torch
from torch import nn

from lit_pretrain.distributed.pipeline import Absent, Call, PipelineLayout, PipelineParts
from lit_pretrain.distributed.pipeline.stand_ins import depends
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan
from tests.support.pipelines import Case, call_of, plan_of


def run(all_parts, call):
    """All stages in order, on one process."""
    for parts in all_parts:
        parts.connect()
    x = ()
    for parts, i in sorted(((p, i) for p in all_parts for i in range(len(p.stages))), key=lambda t: t[0].stages[t[1]]):
        parts.inboxes[i].calls = [call]
        x = (parts.views[i](*x),)
    return x[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("llama", [True, False])
def test_the_stages_in_a_row_are_the_model(schedule, llama):
    case = Case(layers=6, llama=llama, documents=True)
    whole, call = case.model(), call_of(case.batch(0))
    layout = PipelineLayout.of(whole, plan_of(whole), schedule=schedule, ranks=2, num_microbatches=4)
    parts = [PipelineParts(case.model(), plan_of(whole), layout, rank=rank) for rank in range(2)]
    assert torch.equal(run(parts, call), whole(*call.args))


def test_pruning_frees_what_lives_elsewhere_and_changes_no_name():
    case = Case(layers=4, tied=False)
    whole = case.model()
    layout = PipelineLayout.of(whole, plan_of(whole), schedule="1f1b", ranks=2, num_microbatches=4, cut=[1, 3])
    kept = []
    for rank in range(2):
        parts = PipelineParts(case.model(), plan_of(whole), layout, rank=rank)
        state = parts.model.state_dict()
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
        assert {id(p) for p in parts.views[0].parameters()} == {id(p) for p in parts.model.parameters()}
        kept.append(set(state))
    assert kept[0] | kept[1] == set(whole.state_dict())
    assert not kept[0] & kept[1]
    assert {name.split(".")[1] for name in kept[1] if name.startswith("blocks.")} == {"1", "2", "3"}


def test_a_view_sees_parameters_that_are_replaced_later():
    case = Case(layers=4)
    model = case.model()
    layout = PipelineLayout.of(model, plan_of(model), schedule="interleaved_1f1b", ranks=2, num_microbatches=4)
    parts = PipelineParts(model, plan_of(model), layout, rank=1)
    new = nn.Parameter(torch.zeros(16, dtype=torch.float64))
    parts.views[1].norm._parameters["weight"] = new  # as sharding does
    assert parts.model.norm.weight is new


def test_on_one_rank_a_tied_weight_gets_a_shadow_that_no_optimizer_sees():
    case = Case(layers=4)
    model = case.model()
    layout = PipelineLayout.of(model, plan_of(model), schedule="zbv", ranks=2, num_microbatches=4)
    parts = PipelineParts(model, plan_of(model), layout, rank=0)
    first, last = parts.views
    assert parts.tied == [("wte.weight", "wte.weight")]
    assert last.wte.weight is not first.wte.weight
    assert last.unembedding is last.wte.weight
    assert [n for n, _ in model.named_parameters() if "wte" in n] == ["wte.weight"]
    assert id(last.wte.weight) not in {id(p) for p in model.parameters()}


class Foreign(nn.Module):
    """Another style: nested, a list of layers, an output that is no tensor, weights tied by sharing a tensor."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(7, 4)
        self.body.drop = nn.Dropout(0.5)
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, ids, *, scale=1.0):
        x = self.body.drop(self.body.embed(ids)) * 4**0.5
        for layer in self.body.layers:
            x = torch.relu(layer(x)) * scale
        return {"logits": self.head(x), "count": len(ids)}


PLAN = ParallelPlan(embed=("body.embed", "body.drop"), blocks="body.layers", head=("head",))


def test_a_model_of_another_style():
    torch.manual_seed(0)
    whole = Foreign().eval()
    layout = PipelineLayout.of(whole, PLAN, schedule="1f1b", ranks=2, num_microbatches=2, cut=[2, 2])
    call = Call((torch.tensor([[1, 2], [3, 6]]),), {"scale": 1.5})
    expected = whole(*call.args, **call.kwargs)
    parts = []
    for rank in range(2):
        model = Foreign().eval()
        model.load_state_dict(whole.state_dict())
        parts.append(PipelineParts(model, PLAN, layout, rank=rank))
        assert parts[-1].tied == [("body.embed.weight", "head.weight")]
    got = run(parts, call)
    assert got["count"] == 2
    assert torch.equal(got["logits"], expected["logits"])
    assert list(parts[1].model.state_dict()) == [
        "body.layers.2.weight",
        "body.layers.2.bias",
        "body.layers.3.weight",
        "body.layers.3.bias",
        "head.weight",
    ]
    assert isinstance(parts[1].model.body.embed, Absent)


def test_parameters_that_no_stage_would_train_are_refused():
    model = Foreign()
    model.extra = nn.Linear(2, 2)
    layout = PipelineLayout.of(model, PLAN, schedule="1f1b", ranks=2, num_microbatches=2)
    with pytest.raises(
        ConfigError, match=r"leaves out extra\.weight, extra\.bias, so no pipeline stage would train it"
    ):
        PipelineParts(model, PLAN, layout, rank=0)


def test_values_carried_around_layers_are_seen():
    leaf = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    assert depends({"a": [other * 2 + leaf.exp()]}, leaf)
    assert depends((other, leaf), leaf)
    assert not depends([other * leaf.detach(), 3, other], leaf)
