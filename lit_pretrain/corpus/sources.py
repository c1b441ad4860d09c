"""The files that a preparation reads, and their division into units of work that depends on the data alone."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow.parquet as pq

from lit_pretrain.corpus import hf_datasets
from lit_pretrain.corpus._files import readable_errors
from lit_pretrain.corpus.records import compression_of, zstandard
from lit_pretrain.errors import ConfigError, DataError

FORMATS = ("text", "jsonl", "parquet")
DOCUMENTS = ("file", "line", "separator")
_FORMAT_OF = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_STAMPS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "md5Hash")  # by file system
_SMALLEST_UNIT, _LARGEST_UNIT, _WANTED_UNITS = 2**24, 2**30, 1024


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents lie in the input.

    Args:
        documents: Of text files: ``file`` (each is one document), ``line`` or ``separator``.
        separator: The text between documents, with ``separator``.
        text_key: Key of the text in JSONL, name of the column in Parquet and in datasets.
        max_document_bytes: Longer documents are left out and counted; bounds the memory.
        dataset_config: Of a Hugging Face dataset that has several.
        dataset_split: Of a Hugging Face dataset.
    """

    documents: str = "file"
    separator: str | None = None
    text_key: str = "text"
    max_document_bytes: int = 2**24
    dataset_config: str | None = None
    dataset_split: str = "train"


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file, or one Hugging Face dataset.

    Args:
        path: As fsspec opens it.
        name: Path below the folder that was given; the order and the identity of a preparation.
        kind: ``text``, ``jsonl``, ``parquet`` or ``dataset``.
        size: Bytes on disk.
        stamp: Changes when the content does: a time or a checksum, as far as the file system knows one.
    """

    path: str
    name: str
    kind: str
    size: int
    stamp: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a file.

    Args:
        path: The file.
        kind: As of the file.
        size: Bytes, to weigh the work.
        start: First byte, row group (Parquet) or row (dataset).
        end: After the last; None is the end of the file.
    """

    path: str
    kind: str
    size: int
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What ``input`` names.

    Args:
        files: In reading order.
        left_out: Endings of files in folders whose kind is unknown, and how many there are.
    """

    files: tuple[InputFile, ...]
    left_out: dict[str, int] = field(default_factory=dict)


def find_inputs(inputs: Sequence[str], *, format: str | None, reading: Reading) -> Found:
    """List files, folders (with everything below), globs and datasets, each file once, by name within each input.

    Args:
        inputs: Paths on any file system of fsspec, and ``hf://NAME``.
        format: Kind of every file; None goes by the names.
        reading: Names the split of datasets.

    Raises:
        ConfigError: Nothing is given, a package is missing, or a file's kind is unknown.
        DataError: Something is missing, cannot be listed or is empty.
    """
    files: dict[str, InputFile] = {}
    left_out: Counter[str] = Counter()
    if not inputs:
        raise ConfigError("input is empty; give it files, folders or globs.")
    for given in inputs:
        with readable_errors(given, doing="read"):
            if hf_datasets.is_dataset(given):
                some = [InputFile(**hf_datasets.describe(given, reading=reading), kind="dataset")]
            else:
                some = _list(given, format, left_out)
        for file in some:
            files.setdefault(file.path, file)
    if any(compression_of(file.path) == ".zst" for file in files.values()):
        zstandard()
    return Found(files=tuple(files.values()), left_out=dict(sorted(left_out.items())))


def _list(given: str, format: str | None, left_out: Counter[str]) -> list[InputFile]:
    try:
        fs, root = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:  # a file system whose package is missing, or an unknown protocol
        raise ConfigError(f"input={given} cannot be opened ({error}).") from error
    infos = _infos(fs, given, root)
    found, unknown = [], []
    for info in sorted(infos, key=lambda info: str(info["name"])):
        path = str(info["name"])
        name = posixpath.relpath(path, root) if path != root and _is_below(path, root) else posixpath.basename(path)
        if path != root and any(part.startswith(".") for part in name.split("/")):
            continue
        kind = format or kind_of(path)
        if kind is None:
            unknown.append(path)
            continue
        stamp = next((str(info[key]) for key in _STAMPS if info.get(key) is not None), "")
        local = "file" in fs.protocol
        place = path if local else fs.unstrip_protocol(path)
        found.append(InputFile(path=place, name=name, kind=kind, size=int(info["size"] or 0), stamp=stamp))
    left_out.update(posixpath.splitext(path)[1] or "no ending" for path in unknown if found)
    if unknown and not found:
        known = ", ".join(_FORMAT_OF)
        raise DataError(
            f"{unknown[0]} is of unknown kind (known: {known}, and text and JSONL also with .gz or .zst); say what it "
            f"is with format={'|'.join(FORMATS)}."
        )
    if not found:
        raise DataError(f"input={given} holds no files.")
    return found


def _infos(fs: Any, given: str, root: str) -> list[dict[str, Any]]:
    """Names, sizes and times of the files that one input names."""
    if any(sign in given for sign in "*?[") and not fs.exists(root):
        infos = [info for info in fs.glob(root, detail=True).values() if info["type"] == "file"]
        if not infos:
            raise DataError(f"input={given} matches no file; check the pattern.")
        return infos
    if not fs.exists(root):
        raise DataError(f"input={given} does not exist; check the path.")
    if not fs.isdir(root):
        return [fs.info(root)]
    return list(fs.find(root, detail=True).values())


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root.rstrip("/") + "/")


def kind_of(path: str) -> str | None:
    """``text``, ``jsonl`` or ``parquet`` by a file's name; None for names of other kinds."""
    stem = path.removesuffix(compression_of(path) or "")
    kind = _FORMAT_OF.get(posixpath.splitext(stem)[1].lower())
    return None if kind == "parquet" and stem != path else kind


def unit_size(total: int) -> int:
    """Bytes of input per unit of work when the user does not say: about a thousand units, of 16 MiB to 1 GiB."""
    return min(max(total // _WANTED_UNITS, _SMALLEST_UNIT), _LARGEST_UNIT)


def plan_units(files: Iterable[InputFile], *, reading: Reading, unit_bytes: int) -> list[list[Piece]]:
    """Divide files into units of about ``unit_bytes``, in order; the same files always give the same units.

    A compressed file, and a file that is one document, cannot be divided.

    Raises:
        DataError: A Parquet file cannot be read or lacks the column.
    """
    units: list[list[Piece]] = []
    room = 0
    for file in files:
        for piece in _pieces(file, reading, unit_bytes):
            if room < piece.size or not units:
                units.append([])
                room = unit_bytes
            units[-1].append(piece)
            room -= piece.size
    return units


def _pieces(file: InputFile, reading: Reading, unit_bytes: int) -> list[Piece]:
    if file.kind == "parquet":
        return _row_groups(file, reading.text_key)
    if file.kind == "dataset":
        rows = hf_datasets.num_rows(file.path, reading=reading)
        step = max(1, rows * unit_bytes // max(1, file.size))
        ranges = [(low, min(low + step, rows)) for low in range(0, rows, step)]
        return [
            Piece(path=file.path, kind=file.kind, size=file.size * (high - low) // rows, start=low, end=high)
            for low, high in ranges
        ]
    whole = compression_of(file.path) is not None or (file.kind == "text" and reading.documents == "file")
    if whole or file.size <= unit_bytes:
        return [Piece(path=file.path, kind=file.kind, size=file.size)]
    return [
        Piece(path=file.path, kind=file.kind, size=min(unit_bytes, file.size - low), start=low, end=low + unit_bytes)
        for low in range(0, file.size, unit_bytes)
    ]


def _row_groups(file: InputFile, column: str) -> list[Piece]:
    with readable_errors(file.path, doing="read"), fsspec.open(file.path, "rb") as raw:
        try:
            metadata = pq.ParquetFile(raw).metadata
        except ValueError as error:  # pyarrow's own errors are ValueErrors
            raise DataError(f"{file.path} is not a Parquet file ({error}); leave it out or copy it again.") from error
    names = metadata.schema.to_arrow_schema().names
    if column not in names:
        raise DataError(f"{file.path} has no column {column!r} (text_key); it has {', '.join(map(repr, names))}.")
    return [
        Piece(path=file.path, kind=file.kind, size=_column_bytes(metadata.row_group(i), column), start=i, end=i + 1)
        for i in range(metadata.num_row_groups)
    ]


def _column_bytes(group: Any, column: str) -> int:
    """Uncompressed bytes of one column of a row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(int(c.total_uncompressed_size) for c in columns if c.path_in_schema.split(".")[0] == column)
