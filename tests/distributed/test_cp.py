"""Context parallelism, alone and with every other axis, equals one process, in float64."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.strategies import ContextParallelStrategy, HybridParallelStrategy
from tests.support.parity import BOUND, Wide, adamw, check, config, global_batches
from tests.support.plain import Classifier, trainer


def test_two_ranks(ranks):
    cp = {"context_parallel_size": 2}
    check(
        ranks,
        2,
        [
            (cp, {"accumulate": 3}),
            ({**cp, "stage": 3}, {"style": "llama", "tied": False}),
            ({**cp, "stage": 0}, {"style": "llama"}),
        ],
    )


@pytest.mark.slow
def test_four_ranks(ranks):
    cp = {"context_parallel_size": 2}
    check(
        ranks,
        4,
        [
            ({"context_parallel_size": 4}, {"style": "llama", "accumulate": 3}),
            ({**cp, "stage": 3}, {"tied": False}),
            ({**cp, "stage": 0}, {}),
            ({**cp, "tensor_parallel_size": 2, "sequence_parallel": True}, {"style": "llama", "tied": False}),
            ({**cp, "pipeline_parallel_size": 2, "num_microbatches": 4}, {"layers": 4, "rows": 24}),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "zbv", "stage": 3},
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "tensor_parallel_size": 2},
        {"replicate_size": 2, "shard_size": 2, "stage": 3},
    ],
    ids=["dp2 pp2 cp2", "pp2 tp2 cp2", "hybrid 2 x 2 x cp2"],
)
def test_eight_ranks(ranks, strategy):
    untied = {"style": "llama", "tied": False, "layers": 4, "rows": 24}
    check(ranks, 8, [({"context_parallel_size": 2, **strategy}, untied)])


# -------------------------------------------------------------------- documents, checkpointing, text


def with_documents(batches):
    """The same batches, each row cut into documents of three or more tokens."""
    out = []
    for i, batch in enumerate(batches):
        cut = 3 + i % 3
        places = torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])
        out.append(
            {**batch, "doc_ids": (places >= cut).long(), "positions": torch.where(places >= cut, places - cut, places)}
        )
    return out


BATCHES = with_documents(global_batches(updates=3, rows=4))


class Checkpointed(Wide):
    """Blocks are computed again in backward, and with them the ring."""

    def __init__(self, mode):
        super().__init__(config("llama", tied=True), optimizer=adamw, seed=5, activation_checkpointing=mode)


def on_documents(strategy, mode):
    texts = []

    class Sample(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            texts.append(pl_module.generate([1, 2, 3], max_new_tokens=4, temperature=0.0))

    module = Checkpointed(mode)
    kind = "auto" if strategy is None else HybridParallelStrategy(**strategy)
    run = trainer(kind, devices=1 if strategy is None else 2, callbacks=[Sample()])
    run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return module.exact, {n: state.whole(p) for n, p in module.named_parameters()}, texts


def several_on_documents(cases):
    return [on_documents(*case) for case in cases]


def test_documents_recomputation_and_text(ranks):
    losses, weights, texts = on_documents(None, "none")
    cases = [({"context_parallel_size": 2, "stage": stage}, mode) for stage, mode in ((1, "full"), (3, "selective"))]
    for results in ranks(2, several_on_documents, cases):
        for exact, got, written in results:
            assert max(abs(a - b) for a, b in zip(exact, losses, strict=True)) <= BOUND * max(losses)
            for name, value in weights.items():
                assert float((got[name] - value).abs().max()) <= BOUND, name
            assert written == texts  # on whole sequences, by all ranks alike


# -------------------------------------------------------------------- what is refused


class Counts(Wide):
    """Lets the model count positions itself."""

    def training_step(self, batch, batch_idx):
        return self.model.loss(self.model(batch["ids"]), batch["targets"]).nll_sum


def refusals():
    out = []

    def attempt(module, data, **settings):
        try:
            trainer(ContextParallelStrategy(2), devices=2).fit(module, data)
        except ConfigError as error:
            return out.append(str(error))
        return out.append("went through")

    def batches(length):
        one = {"ids": torch.zeros(2, length, dtype=torch.int64), "targets": torch.zeros(2, length, dtype=torch.int64)}
        return torch.utils.data.DataLoader([one], batch_size=None)

    attempt(Counts(config("llama", tied=True), optimizer=adamw), batches(8))
    attempt(Wide(config("llama", tied=True), optimizer=adamw), batches(6))
    attempt(Wide(config("llama", tied=True), optimizer=adamw), torch.utils.data.DataLoader([torch.zeros(2, 8)]))
    return out


def test_batches_and_steps_that_would_train_on_nonsense_are_refused(ranks):
    for places, length, kind in ranks(2, refusals):
        assert places.startswith("Counts.training_step does not read batch['positions'], but with strategy.context_par")
        assert "=6 must be a multiple of 2 x strategy.context_parallel_size=2; use 4 or 8 tokens" in length
        assert kind.startswith("strategy.context_parallel_size=2 cuts batches that are mappings with ids (B, T)")


class NoHook(pl.LightningModule):
    """Names an attention layer that cannot be taken over."""

    parallel_plan = ParallelPlan(attention=("layer",))

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Classifier(),
            "strategy.context_parallel_size=2 needs to know the attention layers of Classifier, and its plan",
        ),
        (NoHook(), "strategy.context_parallel_size=2 puts ring attention in the place of a method attend(q, k, v, con"),
        (Wide(config("gpt2", tied=True, dropout=0.1)), "model.dropout=0.1 needs whole rows of attention weights"),
    ],
    ids=["no plan", "no hook", "dropout"],
)
def test_models_that_ring_attention_cannot_serve_are_refused_before_any_process_starts(module, message, monkeypatch):
    run = trainer(ContextParallelStrategy(), devices=2)
    run.strategy.connect(module)
    module.trainer = run
    with pytest.raises(ConfigError) as e:
        run.strategy._check_before_launch()
    assert str(e.value).startswith(message)
