"""A corpus with its files open and checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus import TokenizerFile, TokenStream, Windows, check_alike, open_tokens
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.specs import PreparedCorpus


@dataclass(frozen=True, kw_only=True)
class OpenedCorpus:
    """What the data module reads.

    Args:
        train: Training windows per source.
        validation: Held-out windows per source, in the order of ``train``; None for a source without.
        tokenizer: None when only ids are known.
        vocab_size: Ids run from 0 to ``vocab_size - 1``.
        eos_id: The id that ends a document; None when unknown.
    """

    train: dict[str, Windows]
    validation: list[Windows | None]
    tokenizer: TokenizerFile | None
    vocab_size: int
    eos_id: int | None


def open_corpus(found: PreparedCorpus, *, sequence_length: int, isolate_documents: bool) -> OpenedCorpus:
    """Open every source.

    Raises:
        ConfigError: When nothing says how large the vocabulary is.
        DataError: When files are missing, damaged, too short or made with different tokenizers.
    """
    tokenizer = None if found.tokenizer is None else TokenizerFile(found.tokenizer, eos_token=found.eos_token)
    vocab_size = found.vocab_size if tokenizer is None else tokenizer.vocab_size
    eos_id = found.eos_id if tokenizer is None else tokenizer.eos_id

    def opened(paths: Mapping[str, Path]) -> dict[str, TokenStream]:
        return {
            name: open_tokens(path, dtype=found.dtype, vocab_size=vocab_size, eos_id=eos_id)
            for name, path in paths.items()
        }

    train, validation = opened(found.train), opened(found.validation)
    streams = [*train.values(), *validation.values()]
    check_alike(streams, tokenizer_hash="" if tokenizer is None else tokenizer.content_hash)
    info = streams[0].info
    if info.vocab_size is None:
        raise ConfigError(
            f"data.corpus.vocab_size is not set and {streams[0].path} does not say it; set it, or "
            "data.corpus.tokenizer."
        )
    if isolate_documents:
        for stream in streams:
            _ = stream.document_starts  # refuse before the first step
    return OpenedCorpus(
        train={name: Windows(stream, sequence_length=sequence_length) for name, stream in train.items()},
        validation=[
            Windows(validation[name], sequence_length=sequence_length, keep_partial=True)
            if name in validation
            else None
            for name in train
        ],
        tokenizer=tokenizer,
        vocab_size=info.vocab_size,
        eos_id=info.eos_id,
    )


def check_ids(
    ids: NDArray[np.int64],
    targets: NDArray[np.int64],
    sources: Sequence[Windows],
    window: NDArray[np.int64],
    *,
    vocab_size: int,
) -> None:
    """Refuse ids that a model has no row for. A manifest vouches for its files, and files can change after it.

    Costs microseconds a batch.

    Args:
        ids: Of a batch, (B, T).
        targets: (B, T).
        sources: Where each row comes from, (B,).
        window: Which window of it, (B,).
        vocab_size: Ids run from 0 to ``vocab_size - 1``.

    Raises:
        DataError: Naming the file and the place.
    """
    if max(int(ids.max()), int(targets.max())) < vocab_size:
        return
    largest = np.maximum(ids, targets).max(axis=1)
    row = int(largest.argmax())
    place = int(window[row]) * ids.shape[1]
    raise DataError(
        f"{sources[row].stream.path} holds the id {largest[row]} near token {place}, beyond vocab_size={vocab_size}: "
        "it "
        "was changed after it was written; write it again."
    )
