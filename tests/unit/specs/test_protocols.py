"""Protocols are met by shape alone."""

from __future__ import annotations

from pathlib import Path

from lit_pretrain.specs import (
    AppliedUpdates,
    CorpusProvider,
    GradientNorm,
    PreparedCorpus,
    TextGenerator,
    TokenAccounting,
)


class Whole:
    tokens_per_update = 8
    applied_updates = 3

    def prepare(self):
        return PreparedCorpus(train={})

    def locate(self):
        return PreparedCorpus(train={})

    def global_grad_norm(self, parameters):
        return 0.0

    def generate(self, prompt_ids, *, max_new_tokens):
        return []


def test_protocols_are_met_by_shape():
    for protocol in (AppliedUpdates, CorpusProvider, GradientNorm, TextGenerator, TokenAccounting):
        assert isinstance(Whole(), protocol)
        assert not isinstance(object(), protocol)


def test_a_prepared_corpus_may_have_no_validation_and_no_tokenizer():
    corpus = PreparedCorpus(train={"code": Path("shards")})
    assert corpus.validation == {}
    assert corpus.tokenizer is None
