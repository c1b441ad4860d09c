"""Which documents are held out: decided by each text alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

FEW_TOKENS = 10_000
"""Held-out tokens below which the validation loss is uncertain: a token's loss scatters by about 3 nats, and so the
mean of that many by 0.03 (3 / sqrt(10,000)), more than a change of a setting often gives."""


def holdout_mark(text: str) -> int:
    """A number from 0 to 2^64 - 1 that depends on the text alone; documents below the limit are held out."""
    return int.from_bytes(hashlib.sha256(b"split" + text.encode()).digest()[:8], "big")


def holdout_limit(validation_fraction: float) -> int:
    """The mark below which that share of documents lies."""
    return int(validation_fraction * 2**64)


def split_documents(texts: Sequence[str], *, validation_fraction: float) -> dict[str, list[str]]:
    """Documents as ``train`` and ``validation``, decided by a hash of each text alone.

    Equal texts land on one side, and a document keeps its side whatever else there is. With two documents or more, both
    sides get one at least.
    """
    marks = [holdout_mark(text) for text in texts]
    limit = holdout_limit(validation_fraction)
    if len(set(marks)) > 1:
        limit = min(max(limit, min(marks) + 1), max(marks))
    return {
        "train": [text for text, mark in zip(texts, marks, strict=True) if mark >= limit],
        "validation": [text for text, mark in zip(texts, marks, strict=True) if mark < limit],
    }
