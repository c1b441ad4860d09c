"""What counting alone achieves: unigram and bigram models, as the mark a trained model must pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus.reader import TokenStream

_DENSE_VOCAB = 4096  # up to here a table of all pairs (128 MiB) is counted into; beyond, pairs are sorted
_CHUNK = 2**23  # pairs counted in one piece


@dataclass(frozen=True)
class PairCounts:
    """How often each pair of neighbouring ids occurs.

    Args:
        vocab_size: V.
        pairs: ``first x V + second``, rising, only those that occur, (P,), int64.
        counts: Occurrences, (P,), int64, at least 1.
    """

    vocab_size: int
    pairs: NDArray[np.int64]
    counts: NDArray[np.int64]

    def __add__(self, other: PairCounts) -> PairCounts:
        pairs, inverse = np.unique(np.concatenate([self.pairs, other.pairs]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self.counts, other.counts]), pairs.size)
        return PairCounts(self.vocab_size, pairs, counts.astype(np.int64))


def count_pairs(streams: Iterable[TokenStream], *, vocab_size: int) -> PairCounts:
    """Neighbouring ids within each stream, pairs around an end-of-document id included."""
    empty = np.empty(0, np.int64)
    total = PairCounts(vocab_size, empty, empty)
    table = np.zeros(vocab_size**2, np.int64) if vocab_size <= _DENSE_VOCAB else None
    for stream in streams:
        for low in range(0, stream.num_tokens - 1, _CHUNK):
            ids = stream.piece(low, _CHUNK + 1).astype(np.int64)
            keys = ids[:-1] * vocab_size + ids[1:]
            if table is not None:
                table += np.bincount(keys, minlength=table.size)
            else:
                total = total + PairCounts(vocab_size, *np.unique(keys, return_counts=True))
    if table is not None:
        pairs = np.flatnonzero(table)
        total = PairCounts(vocab_size, pairs, table[pairs])
    return total


class UnigramModel:
    """Relative frequency of each id, with half an occurrence added to every id.

    Args:
        counts: Pairs of the training text; an id counts as often as it is a pair's second.
    """

    def __init__(self, counts: PairCounts) -> None:
        size = counts.vocab_size
        occurrences = np.bincount(counts.pairs % size, counts.counts, size) + 0.5
        self._log = np.log(occurrences) - np.log(occurrences.sum())

    def nats(self, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Negative log-likelihood of each target, (n,), nats; ``ids`` are not looked at."""
        return np.asarray(-self._log[targets])


class BigramModel:
    """Interpolated Kneser-Ney with three discounts found in the counts: the strongest bigram model that only counts.

    Args:
        counts: Pairs of the training text.

    Source: Chen and Goodman 1999, section 3 (modified Kneser-Ney).
    """

    def __init__(self, counts: PairCounts) -> None:
        size = counts.vocab_size
        first, second = np.divmod(counts.pairs, size)
        self._size, self._pairs = size, counts.pairs
        discounts = _discounts(counts.counts)
        taken = discounts[np.minimum(counts.counts, 3)]
        context = np.bincount(first, counts.counts, size)
        seen = np.maximum(context, 1.0)
        self._direct = (counts.counts - taken) / seen[first]
        # what is left of each context goes to the ids that follow many different ids
        self._left = np.where(context > 0, np.bincount(first, taken, size) / seen, 1.0)
        kinds = np.bincount(second, minlength=size).astype(np.float64)
        total = max(float(kinds.sum()), 1.0)
        discount = np.where(kinds > 0, 0.5, 0.0)
        spare = discount.sum() / total if counts.pairs.size else 1.0
        self._follows = (kinds - discount) / total + spare / size

    def probabilities(self, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probability of each target after its id, (n,)."""
        keys = ids * self._size + targets
        place = np.searchsorted(self._pairs, keys)
        place[place == self._pairs.size] = 0
        known = self._pairs[place] == keys if self._pairs.size else np.zeros(keys.shape, bool)
        direct = np.where(known, self._direct[place], 0.0) if self._pairs.size else 0.0
        return np.asarray(direct + self._left[ids] * self._follows[targets])

    def nats(self, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Negative log-likelihood of each target after its id, (n,), nats."""
        return -np.log(self.probabilities(ids, targets))


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Discount of pairs that occur (never), once, twice, three times or more, (4,)."""
    n1, n2, n3, n4 = (float((counts == times).sum()) for times in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0.0:  # too little text for the estimate
        return np.asarray([0.0, 0.5, 0.75, 0.75])
    y = n1 / (n1 + 2 * n2)
    found = np.asarray([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    low, high = np.asarray([0.0, 0.05, 0.05, 0.05]), np.asarray([0.0, 0.95, 1.95, 2.95])
    return np.asarray(np.minimum(np.maximum(found, low), high), np.float64)


@dataclass(frozen=True)
class CrossEntropy:
    """Mean surprise over some targets.

    Args:
        nats: Summed negative log-likelihood, nats.
        targets: Targets.
        num_bytes: UTF-8 bytes the targets stand for; None without a tokenizer.
    """

    nats: float
    targets: int
    num_bytes: int | None

    @property
    def nats_per_token(self) -> float:
        """Comparable to ``val/loss``."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable to ``val/bits_per_byte``; independent of the tokenizer."""
        return None if not self.num_bytes else self.nats / math.log(2) / self.num_bytes

    def __add__(self, other: CrossEntropy) -> CrossEntropy:
        num_bytes = None if self.num_bytes is None or other.num_bytes is None else self.num_bytes + other.num_bytes
        return CrossEntropy(self.nats + other.nats, self.targets + other.targets, num_bytes)
