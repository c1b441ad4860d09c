"""Files to evaluate on, as documents: read as ``prepare`` reads them. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_pretrain.cli import saved
from lit_pretrain.corpus.encode import Tally, usable_documents
from lit_pretrain.corpus.journal import describe_skipped, nothing_usable
from lit_pretrain.corpus.sources import Reading, find_inputs, kind_of, plan_units
from lit_pretrain.corpus.tokenizer import TokenizerFile
from lit_pretrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The documents of one file.

    Args:
        documents: In order.
        about: What they are, such as ``3 documents, field 'text'``; empty for a file that is one document as it stands.
        left_out: Why some were left out; empty for none.
    """

    documents: Sequence[str]
    about: str = ""
    left_out: str = ""


def read_texts(path: str, *, text_key: str) -> Texts:
    """The documents of a file: by its name JSONL or Parquet, compressed or not; any other file is one document.

    Args:
        path: The file.
        text_key: Key of the text in JSONL, column in Parquet.

    Raises:
        ConfigError: It cannot be read as what its name says.
        DataError: The same, from the readers that ``prepare`` has too.
    """
    place = Path(path).expanduser()
    if kind_of(place.name) in (None, "text") and not place.name.endswith((".txt.gz", ".txt.zst")):
        return Texts(documents=[saved.read_text(place, setting="text")])
    if place.is_dir() or not place.exists():
        return Texts(documents=[saved.read_text(place, setting="text")])  # says why not
    reading = Reading(text_key=text_key)
    found, tally = find_inputs([str(place)], format=None, reading=reading), Tally()
    units = plan_units(found.files, reading=reading, unit_bytes=found.files[0].size + 1)
    documents = [d.text for unit in units for d in usable_documents(unit, reading=reading, strict=False, tally=tally)]
    if not documents:
        raise ConfigError(f"text={path}: {nothing_usable(tally)} text_key={text_key} names the text in each record.")
    if kind_of(place.name) == "text":
        return Texts(documents=documents)
    count = "1 document" if len(documents) == 1 else f"{len(documents):,} documents"
    return Texts(documents=documents, about=f"{count}, field {text_key!r}", left_out=describe_skipped(tally.reasons))


def encode(texts: Texts, tokenizer: TokenizerFile, *, path: str, max_tokens: int | None) -> list[list[int]]:
    """Token ids of each document that has something to predict, cut where the file has ``max_tokens`` targets.

    Raises:
        ConfigError: There is none.
    """
    encoded = tokenizer.encode_batch(list(texts.documents))
    left = max_tokens
    kept: list[list[int]] = []
    for ids in encoded:
        if len(ids) < 2 or left == 0:
            continue
        cut = list(ids) if left is None else list(ids[: left + 1])
        left = None if left is None else left - (len(cut) - 1)
        kept.append(cut)
    if not kept:
        raise ConfigError(
            f"text={path} has {max(map(len, encoded))} tokens, and predicting needs 2: the first is only read; name a "
            f"longer text."
        )
    return kept
