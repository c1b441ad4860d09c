"""Hugging Face models in ordinary LightningModules, by their own plans."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.strategies import HybridParallelStrategy, TensorParallelStrategy
from tests.support.parity import BOUND
from tests.support.plain import trainer

transformers = pytest.importorskip("transformers")


class Language(pl.LightningModule):
    """What a user writes around a causal language model."""

    def __init__(self, kind: str, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        if kind == "llama":
            self.model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=37,
                    hidden_size=16,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=16,
                    tie_word_embeddings=tied,
                )
            )
        else:
            self.model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=37,
                    n_positions=16,
                    n_embd=16,
                    n_layer=2,
                    n_head=4,
                    attn_pdrop=0,
                    embd_pdrop=0,
                    resid_pdrop=0,
                )
            )

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def fit(kind, tied, strategy):
    module = Language(kind, tied=tied)
    devices = 1 if strategy is None else 2
    run = trainer(
        "auto" if strategy is None else HybridParallelStrategy(**strategy), devices=devices, gradient_clip_val=0.5
    )
    ids = torch.randint(37, (4, 4, 8), generator=torch.Generator().manual_seed(8))
    place = getattr(run.strategy, "dims", None)
    size = 1 if place is None else place.data_parallel_size
    rank = run.global_rank if size > 1 else 0
    mine = [batch[rank * 4 // size : (rank + 1) * 4 // size] for batch in ids]
    run.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))
    whole = getattr(place, "pp", 1) == 1
    one = not tied or not whole or module.model.lm_head.weight is module.model.model.embed_tokens.weight
    return one, {name: state.whole(p) for name, p in module.named_parameters()}


def fit_all(cases):
    return [fit(*case) for case in cases]


@functools.cache
def reference(kind, tied):
    return fit(kind, tied, None)[1]


ZERO, TP = {"stage": 3}, {"tensor_parallel_size": 2, "stage": 3}
PP = {"pipeline_parallel_size": 2, "num_microbatches": 4}
# Hugging Face's GPT-2 does not say in which order its parts run, so the user does.
GPT2_PP = {
    **PP,
    "plan": ParallelPlan(
        embed=("model.transformer.wte", "model.transformer.wpe"),
        blocks="model.transformer.h",
        head=("model.transformer.ln_f", "model.lm_head"),
    ),
}


def check(ranks, cases):
    outputs = ranks(2, fit_all, cases)
    for i, (kind, tied, strategy) in enumerate(cases):
        want = reference(kind, tied)
        results = [output[i] for output in outputs]
        assert set().union(*(got for _, got in results)) >= set(want)
        for one, got in results:
            assert one  # splitting makes two weights of one, which then drift apart
            assert (got.keys() == want.keys()) != ("pipeline_parallel_size" in strategy)
            for name, value in got.items():
                twin = "model.model.embed_tokens.weight" if kind == "llama" else "model.transformer.wte.weight"
                expected = want.get(name, want[twin])  # a tied head goes by its own name where the embedding is not
                assert float((value - expected).abs().max()) <= BOUND, (kind, tied, name)


def test_parity_with_one_process(ranks):
    check(ranks, [("llama", True, TP), ("llama", False, ZERO), ("llama", True, PP)])


@pytest.mark.slow
def test_parity_of_the_others(ranks):
    check(
        ranks,
        [
            ("llama", False, TP),
            ("llama", True, ZERO),
            ("gpt2", False, ZERO),
            ("llama", False, PP),
            ("gpt2", False, GPT2_PP),
        ],
    )


def test_layers_that_cannot_be_split_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^strategy.tensor_parallel_size=2 needs a plan of how Language splits its"):
        trainer(TensorParallelStrategy(2), devices=2).fit(Language("gpt2"), torch.utils.data.DataLoader([0]))
