"""Small pipelines for tests, and the one-process runs they must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_pretrain.distributed.pipeline import Call, Pipeline, PipelineLayout, PipelineParts
from lit_pretrain.distributed.pipeline.engine import make_pair
from lit_pretrain.models import GPT
from lit_pretrain.specs import GPTConfig, ParallelPlan

BOUND = 1e-12  # float64; times max(1, greatest value of the model)


@dataclass(frozen=True)
class Case:
    """One run: ``updates`` updates of ``accumulation`` batches of ``rows`` rows, on tokens that a seed gives."""

    schedule: str = "1f1b"
    microbatches: int = 4
    stages: int | None = None
    tied: bool = True
    llama: bool = False
    accumulation: int = 1
    layers: int = 4
    cut: tuple[int, ...] | None = None
    documents: bool = False
    updates: int = 2
    rows: int = 8
    clip: float = 0.05
    checkpointing: str = "none"
    evaluates: bool = False
    records: bool = False

    @property
    def config(self) -> GPTConfig:
        llama: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 1}
        return GPTConfig(
            vocab_size=29,
            block_size=12,
            n_layer=self.layers,
            n_head=2,
            n_embd=16,
            ffn_hidden_size=24,
            vocab_multiple=8,
            tie_embeddings=self.tied,
            init_std=0.2,
            **(llama if self.llama else {}),
        )

    def model(self) -> GPT:
        return GPT(self.config, activation_checkpointing=self.checkpointing).double()

    def batch(self, number: int, *, rows: int | None = None) -> dict[str, Tensor]:
        rows = rows or self.rows
        draw = torch.Generator().manual_seed(1000 + number)
        ids = torch.randint(29, (rows, 13), generator=draw)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=draw) < 0.2] = -100
        batch = {"ids": ids[:, :-1].contiguous(), "targets": targets}
        if self.documents:
            doc_ids = (torch.rand(rows, 12, generator=draw) < 0.2).long().cumsum(1)
            starts = torch.zeros_like(doc_ids)
            for t in range(1, 12):
                starts[:, t] = torch.where(doc_ids[:, t] != doc_ids[:, t - 1], torch.tensor(t), starts[:, t - 1])
            batch |= {"doc_ids": doc_ids, "positions": torch.arange(12) - starts}
        return batch


def plan_of(model: GPT) -> ParallelPlan:
    """Where the model can be cut."""
    return model.parallel_plan


def call_of(batch: dict[str, Tensor]) -> Call:
    return Call((batch["ids"], batch.get("positions"), batch.get("doc_ids")))


def result(model: GPT, losses: list[float], norms: list[float], gradients: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def one_process(case: Case) -> dict[str, Any]:
    """The oracle: the whole model on one process, one backward per batch."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for update in range(case.updates):
        optimizer.zero_grad()
        total = 0.0
        for a in range(case.accumulation):
            batch = case.batch(update * case.accumulation + a)
            call = call_of(batch)
            sums = model.loss(model(*call.args), batch["targets"])
            loss = sums.nll_sum / (case.rows * 12 * case.accumulation)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        gradients |= {f"{update} {n}": p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return result(model, losses, norms, gradients)


def pipelined(case: Case) -> dict[str, Any]:
    """The same on one rank of a pipeline over the world; each rank gives what it has."""
    model = case.model()
    plan = plan_of(model)
    layout = PipelineLayout.of(
        model,
        plan,
        schedule=case.schedule,
        ranks=dist.get_world_size(),
        num_microbatches=case.microbatches,
        wanted_stages_per_rank=case.stages,
        cut=case.cut,
    )
    parts = PipelineParts(model, plan, layout, rank=dist.get_rank())
    pair = make_pair([list(range(dist.get_world_size()))], last=layout.last_rank)
    pipeline = Pipeline(parts, device=torch.device("cpu"), group=dist.group.WORLD, pair=pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    head = parts.views[-1]
    losses, norms, gradients = [], [], {}
    order = recorded(pipeline) if case.records else []

    def run(batch: dict[str, Tensor], denominator: int, *, train: bool) -> float:
        rows = len(batch["ids"])
        microbatches = layout.num_microbatches if train else next(m for m in (4, 2, 1) if rows % m == 0)
        targets = batch["targets"].chunk(microbatches)
        seen = []

        def loss(hidden: Tensor, i: int) -> Tensor:
            out = head.loss(hidden, targets[i]).nll_sum / denominator
            seen.append(float(out.detach()))
            return out

        if train:
            pipeline.train(call_of(batch), loss)
        else:
            pipeline.evaluate(call_of(batch), loss, microbatches=microbatches, key=rows)
        return sum(seen)

    evaluated = []
    for update in range(case.updates):
        optimizer.zero_grad()
        total = 0.0
        for a in range(case.accumulation):
            number = update * case.accumulation + a
            total += run(case.batch(number), case.rows * 12 * case.accumulation, train=True)
            if case.evaluates:
                evaluated += [run(case.batch(number, rows=rows), 1, train=False) for rows in (8, 3, 1)]
        pipeline.ties.sum_gradients()
        losses.append(total)
        counted = [p for p in model.parameters() if id(p) not in pipeline.ties.counted_elsewhere]
        local = torch.nn.utils.get_total_norm([p.grad for p in counted])
        norm = pipeline.total_norm(local)
        norms.append(float(norm))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), case.clip, norm)
        gradients |= {f"{update} {n}": p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return {
        **result(model, losses, norms, gradients),
        "has_last": parts.has_last,
        "evaluated": evaluated,
        "order": list(order),
        "tie_broken": pipeline.ties.differ(),
    }


def recorded(pipeline: Pipeline) -> list[str]:
    """What the stages of this rank do from now on, as actions in words, in order."""
    out: list[str] = []
    make = pipeline._schedule

    def schedule(mode: Any) -> Any:
        before = len(pipeline._stages)
        made = make(mode)
        for stage in pipeline._stages[before:]:
            _listen(stage, out)
        return made

    pipeline._schedule = schedule  # type: ignore[method-assign]
    return out


def _listen(stage: Any, out: list[str]) -> None:
    forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def on_forward(i: int, *args: Any, **kwargs: Any) -> Any:
        out.append(f"{stage.stage_index}F{i}")
        return forward(i, *args, **kwargs)

    def on_backward(i: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        out.append(f"{stage.stage_index}{'B' if full_backward else 'I'}{i}")
        return backward(i, *args, full_backward=full_backward, **kwargs)

    def on_weight(i: int, *args: Any, **kwargs: Any) -> Any:
        out.append(f"{stage.stage_index}W{i}")
        return weight(i, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = on_forward, on_backward
    stage.backward_weight_one_chunk = on_weight


def evaluated_alone(case: Case) -> list[float]:
    """The losses that ``evaluates`` gives, on one process with the weights that training has at that time."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for update in range(case.updates):
        optimizer.zero_grad()
        for a in range(case.accumulation):
            number = update * case.accumulation + a
            batch = case.batch(number)
            sums = model.loss(model(*call_of(batch).args), batch["targets"])
            (sums.nll_sum / (case.rows * 12 * case.accumulation)).backward()
            for rows in (8, 3, 1):
                batch = case.batch(number, rows=rows)
                with torch.no_grad():
                    out.append(float(model.loss(model(*call_of(batch).args), batch["targets"]).nll_sum))
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return out


def many_pipelined(cases: list[Case]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [pipelined(case) for case in cases]


def deviation(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Greatest difference over the model, against its greatest value where that is above 1."""
    scale = max(1.0, *(float(v.abs().max()) for v in expected.values()))
    return max(float((got[name] - value).abs().max()) for name, value in expected.items()) / scale


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], what: Any) -> None:
    """Every rank's share together is the one process's run, and nothing is missing."""
    for key in ("gradients", "weights"):
        names = {name for rank in ranks for name in rank[key]}
        assert names == set(expected[key]), what
        for rank in ranks:
            share = {name: expected[key][name] for name in rank[key]}
            assert deviation(rank[key], share) <= BOUND, (what, key, deviation(rank[key], share))
    for rank in ranks:
        assert not rank["tie_broken"], what
        assert deviation(*({"norm": torch.tensor(r["norms"])} for r in (rank, expected))) <= BOUND, what
        if rank["has_last"]:
            assert deviation(*({"loss": torch.tensor(r["losses"])} for r in (rank, expected))) <= BOUND, what
