"""One unit of a preparation: documents in, one shard folder per split out, whole or absent."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_pretrain.corpus._files import readable_errors, sync_folder, write_whole
from lit_pretrain.corpus.documents import EMPTY, Document, Unusable, read_documents
from lit_pretrain.corpus.holdout import holdout_limit, holdout_mark
from lit_pretrain.corpus.sources import Piece, Reading
from lit_pretrain.corpus.tokenizer import TokenizerFile
from lit_pretrain.corpus.writer import ShardWriter
from lit_pretrain.errors import DataError

SPLITS = ("train", "validation")
RECORD = "unit.json"
_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 4096  # encoded at once


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What every unit of a preparation has in common; small, for it is sent to every worker.

    Args:
        folder: Where finished units lie.
        tokenizer: A ``tokenizer.json``.
        eos_token: The token that ends a document.
        reading: How documents lie in the input.
        validation_fraction: Share of documents held out.
        strict: Whether a document that cannot be used is an error.
        config_hash: Which settings and input the shards are made of.
    """

    folder: Path
    tokenizer: Path
    eos_token: str
    reading: Reading
    validation_fraction: float
    strict: bool
    config_hash: str


@dataclass
class Tally:
    """Documents that were left out.

    Args:
        reasons: Reason to how many there are, where the first stands, and what more is known of it.
    """

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, unusable: Unusable) -> None:
        """Count one."""
        first = {"documents": 0, "first": unusable.where, "detail": unusable.detail}
        self.reasons.setdefault(unusable.reason, first)["documents"] += 1

    def merge(self, reasons: dict[str, dict[str, Any]]) -> None:
        """Count those of a later unit."""
        for reason, what in reasons.items():
            if reason in self.reasons:
                self.reasons[reason]["documents"] += what["documents"]
            else:
                self.reasons[reason] = dict(what)


def unit_folder(folder: Path, number: int) -> Path:
    """Where a finished unit lies."""
    return folder / f"{number:06d}"


def encode_unit(
    pieces: Sequence[Piece], number: int, *, encoding: Encoding, tokenizer: TokenizerFile
) -> Generator[int]:
    """Encode one unit in memory that does not depend on its size.

    Args:
        pieces: Of the input.
        number: Of the unit.
        encoding: As for all units.
        tokenizer: The opened tokenizer.

    Yields:
        UTF-8 bytes encoded since the last time, so that the caller may stop.

    Raises:
        DataError: A file cannot be read or written, or a document cannot be used and ``strict`` is on.
    """
    folder = unit_folder(encoding.folder, number)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    limit = holdout_limit(encoding.validation_fraction)
    tally = Tally()
    try:
        with readable_errors(beside, doing="write"):
            beside.mkdir()
        writers = [_writer(beside / split, encoding, tokenizer) for split in SPLITS]
        with writers[0], writers[1]:
            for batch in _batches(pieces, encoding, tally):
                for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                    held_out = limit > 0 and holdout_mark(document.text) < limit
                    writers[held_out].add(ids, num_bytes=document.num_bytes)
                yield sum(document.num_bytes for document in batch)
        write_whole(beside / RECORD, json.dumps(tally.reasons, indent=2).encode())
        with readable_errors(folder, doing="write"):
            beside.rename(folder)
            sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _writer(folder: Path, encoding: Encoding, tokenizer: TokenizerFile) -> ShardWriter:
    return ShardWriter(
        folder,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_hash=tokenizer.content_hash,
        config_hash=encoding.config_hash,
    )


def _batches(pieces: Sequence[Piece], encoding: Encoding, tally: Tally) -> Iterator[list[Document]]:
    """Documents in numbers that keep the library busy; those that cannot be used are counted."""
    batch: list[Document] = []
    size = 0
    for document in usable_documents(pieces, reading=encoding.reading, strict=encoding.strict, tally=tally):
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def usable_documents(
    pieces: Sequence[Piece], *, reading: Reading, strict: bool, tally: Tally | None = None
) -> Iterator[Document]:
    """Documents with a text.

    Raises:
        DataError: A document cannot be used and ``strict`` is on; empty ones are always just left out.
    """
    for piece in pieces:
        for found in read_documents(piece, reading=reading):
            if isinstance(found, Document):
                yield found
                continue
            if strict and found.reason != EMPTY:
                detail = f" ({found.detail})" if found.detail else ""
                raise DataError(
                    f"{found.where}: {found.reason}{detail}; repair it, or leave such documents out with errors=skip."
                )
            if tally is not None:
                tally.add(found)
