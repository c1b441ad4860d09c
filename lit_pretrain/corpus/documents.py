"""Documents out of a piece of input, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import fsspec
import pyarrow.parquet as pq

from lit_pretrain.corpus import hf_datasets
from lit_pretrain.corpus._files import readable_errors
from lit_pretrain.corpus.records import DamagedError, open_bytes, split_records
from lit_pretrain.corpus.sources import Piece, Reading

EMPTY = "empty"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS = 256  # of a Parquet column at once


class Document(NamedTuple):
    """A text and its size in UTF-8 bytes."""

    text: str
    num_bytes: int


class Unusable(NamedTuple):
    """Why a document cannot be used, where it stands, and what more can be said."""

    reason: str
    where: str
    detail: str = ""


def read_documents(piece: Piece, *, reading: Reading) -> Iterator[Document | Unusable]:
    """Everything in a piece, in order.

    Raises:
        ConfigError: A package is missing.
        DataError: The file cannot be read.
    """
    try:
        for where, value in _values(piece, reading):
            yield value if isinstance(value, Unusable) else _checked(value, where, reading)
    except DamagedError as error:
        yield Unusable("end of a damaged file", piece.path, str(error))


def _values(piece: Piece, reading: Reading) -> Iterator[tuple[str, Any]]:
    """Where, and what stands there: bytes, a text, another value, or an Unusable."""
    if piece.kind == "parquet":
        yield from _parquet(piece, reading.text_key)
    elif piece.kind == "dataset":
        assert piece.end is not None
        rows = hf_datasets.read_rows(piece.path, piece.start, piece.end, reading=reading)
        for row, value in enumerate(rows, piece.start):
            yield f"{piece.path}, row {row}", value
    elif piece.kind == "text" and reading.documents == "file":
        with open_bytes(piece.path) as file:
            yield piece.path, file.read(reading.max_document_bytes + 1).removeprefix(_BYTE_ORDER_MARK)
    else:
        yield from _records(piece, reading)


def _records(piece: Piece, reading: Reading) -> Iterator[tuple[str, Any]]:
    by_line = piece.kind == "jsonl" or reading.documents == "line"
    separator = b"\n" if by_line else (reading.separator or "").encode()
    # JSON escapes and other keys take room beside the text.
    limit = reading.max_document_bytes * (4 if piece.kind == "jsonl" else 1)
    with open_bytes(piece.path) as file:
        for offset, record in split_records(file, separator=separator, start=piece.start, end=piece.end, limit=limit):
            where = f"{piece.path}, byte {offset}"
            if record is None:
                yield where, Unusable("too long", where)
                continue
            if offset == 0:
                record = record.removeprefix(_BYTE_ORDER_MARK)
            if by_line:
                record = record.removesuffix(b"\r")
            yield where, _from_json(record, where, reading.text_key) if piece.kind == "jsonl" else record


def _from_json(record: bytes, where: str, key: str) -> Any:
    if not record.strip():
        return ""
    try:
        content = json.loads(record.decode())
    except UnicodeDecodeError as error:
        return Unusable("not UTF-8", where, str(error.reason))
    except (ValueError, RecursionError) as error:
        return Unusable("not JSON", where, str(error))
    if not isinstance(content, dict):
        return Unusable("not a JSON object", where)
    if key not in content:
        return Unusable("without the text key", where, f"its keys are {', '.join(map(repr, content)) or 'none'}")
    return content[key]


def _parquet(piece: Piece, column: str) -> Iterator[tuple[str, Any]]:
    with readable_errors(piece.path, doing="read"), fsspec.open(piece.path, "rb") as raw:
        file = pq.ParquetFile(raw)
        for group in range(piece.start, piece.end if piece.end is not None else file.num_row_groups):
            row = 0
            try:
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[column]):
                    for value in batch.column(0):
                        where = f"{piece.path}, row {row} of row group {group}"
                        yield where, _plain(value, where)
                        row += 1
            except ValueError as error:  # pyarrow's own errors are ValueErrors
                raise DamagedError(str(error)) from error


def _plain(value: Any, where: str) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:  # a text column with other bytes in it
        return Unusable("not UTF-8", where, str(error.reason))


def _checked(value: Any, where: str, reading: Reading) -> Document | Unusable:
    if isinstance(value, bytes):
        if len(value) > reading.max_document_bytes:
            return Unusable("too long", where)
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Unusable("not UTF-8", where, f"{error.reason} at byte {error.start} of the document")
    if not isinstance(value, str):
        return Unusable("not a text", where, f"it is {type(value).__name__}")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        return Unusable("half a surrogate pair", where)
    if num_bytes > reading.max_document_bytes:
        return Unusable("too long", where)
    if not value.strip():
        return Unusable(EMPTY, where)
    return Document(value, num_bytes)
