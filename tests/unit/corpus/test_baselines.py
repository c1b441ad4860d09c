"""Counting models against sums by hand and a dictionary."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lit_pretrain.corpus import ShardWriter, TokenStream, open_tokens
from lit_pretrain.corpus import baselines as module
from lit_pretrain.corpus.baselines import BigramModel, CrossEntropy, UnigramModel, count_pairs


def stream(folder: Path, ids: list[int], vocab_size: int) -> TokenStream:
    with ShardWriter(folder, vocab_size=vocab_size, eos_id=None) as writer:
        writer.add(ids)
    return open_tokens(folder)


def test_by_hand(tmp_path: Path) -> None:
    counts = count_pairs([stream(tmp_path, [0, 1, 0, 1, 2], 4)], vocab_size=4)
    assert dict(zip(counts.pairs.tolist(), counts.counts.tolist(), strict=True)) == {1: 2, 4: 1, 6: 1}
    unigram = np.exp(-UnigramModel(counts).nats(np.zeros(4, int), np.arange(4)))
    # seconds: 1 twice, 0 and 2 once, 3 never; half an occurrence more for each of 4
    np.testing.assert_allclose(unigram, [1.5 / 6, 2.5 / 6, 1.5 / 6, 0.5 / 6], rtol=1e-14)
    bigram = BigramModel(counts)
    # too few counts for the estimate: discounts 0.5 for one occurrence, 0.75 for two. Kinds of predecessors: 1 each of
    # 0, 1, 2; half of each goes to all: p_follows = 0.5/3 + 0.5/4 for those three, 0.5/4 for id 3
    seen, unseen = 0.5 / 3 + 0.125, 0.125
    after_0 = [0.375 * seen, (2 - 0.75) / 2 + 0.375 * seen, 0.375 * seen, 0.375 * unseen]
    after_1 = [0.5 / 2 + 0.5 * seen, 0.5 * seen, 0.5 / 2 + 0.5 * seen, 0.5 * unseen]
    after_2 = [seen, seen, seen, unseen]
    for context, wanted in enumerate([after_0, after_1, after_2]):
        np.testing.assert_allclose(bigram.probabilities(np.full(4, context), np.arange(4)), wanted, rtol=1e-14)


def reference(ids: list[int], size: int) -> np.ndarray:
    """Modified Kneser-Ney as the paper writes it, with dictionaries and loops."""
    pairs = Counter(itertools.pairwise(ids))
    n = [sum(count == k for count in pairs.values()) for k in range(5)]
    y = n[1] / (n[1] + 2 * n[2])
    d = {1: 1 - 2 * y * n[2] / n[1], 2: 2 - 3 * y * n[3] / n[2], 3: 3 - 4 * y * n[4] / n[3]}
    kinds = Counter(second for _, second in pairs)
    lower = [max(kinds[w] - 0.5, 0) / len(pairs) + 0.5 * len(kinds) / len(pairs) / size for w in range(size)]
    table = np.empty((size, size))
    for v in range(size):
        total = sum(pairs[v, w] for w in range(size))
        for w in range(size):
            if not total:
                table[v, w] = lower[w]
                continue
            left = sum(d[min(pairs[v, x], 3)] for x in range(size) if pairs[v, x]) / total
            count = pairs[v, w]
            table[v, w] = (count - d[min(count, 3)] if count else 0) / total + left * lower[w]
    return table


@pytest.mark.parametrize("dense", [True, False])
def test_against_dictionaries(tmp_path: Path, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 97)
    if not dense:
        monkeypatch.setattr(module, "_DENSE_VOCAB", 1)
    size = 30
    weights = 1.0 / np.arange(1, size)
    ids = np.random.default_rng(0).choice(size - 1, 700, p=weights / weights.sum()).tolist()  # id 29 never occurs
    model = BigramModel(count_pairs([stream(tmp_path, ids, size)], vocab_size=size))
    contexts, targets = np.divmod(np.arange(size * size), size)
    table = model.probabilities(contexts, targets).reshape(size, size)
    np.testing.assert_allclose(table, reference(ids, size), rtol=1e-12)
    np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-12)
    assert (table > 0).all()


def test_streams_are_not_joined(tmp_path: Path) -> None:
    a, b = stream(tmp_path / "a", [0, 1], 3), stream(tmp_path / "b", [2, 0], 3)
    both = count_pairs([a, b], vocab_size=3)
    assert both.pairs.tolist() == [1, 6]
    apart = count_pairs([a], vocab_size=3) + count_pairs([b], vocab_size=3)
    assert apart.pairs.tolist() == both.pairs.tolist()
    assert apart.counts.tolist() == both.counts.tolist()


def test_a_bigram_learns_a_chain(tmp_path: Path) -> None:
    ids = list(range(10)) * 200
    counts = count_pairs([stream(tmp_path, ids, 10)], vocab_size=10)
    targets = np.asarray(ids[1:])
    assert UnigramModel(counts).nats(targets, targets).mean() == pytest.approx(math.log(10), abs=0.01)
    assert BigramModel(counts).nats(np.asarray(ids[:-1]), targets).mean() < 0.02


def test_no_text() -> None:
    empty = count_pairs([], vocab_size=5)
    assert BigramModel(empty).probabilities(np.asarray([0, 3]), np.asarray([1, 4])).tolist() == [0.2, 0.2]


def test_units() -> None:
    score = CrossEntropy(nats=100 * math.log(2), targets=50, num_bytes=200) + CrossEntropy(0.0, 0, 0)
    assert score.nats_per_token == pytest.approx(2 * math.log(2))
    assert score.bits_per_byte == pytest.approx(0.5)
    assert CrossEntropy(1.0, 1, None).bits_per_byte is None
