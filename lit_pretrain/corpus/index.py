"""Document lengths and places in the index format that Megatron reads beside a ``.bin`` file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus._files import readable_errors, write_whole
from lit_pretrain.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# The format's own numbers for types. It has no uint32: int32 has the same bits for every id below 2^31.
_CODE_OF = {"uint8": 1, "uint16": 8, "uint32": 4}
_DTYPE_OF = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True)
class DocumentIndex:
    """Where the documents of one ``.bin`` file lie.

    Args:
        dtype: Type of the ids in the ``.bin`` file, little-endian.
        starts: First token of each document, in tokens, (D,), int64.
        num_tokens: Tokens in the ``.bin`` file.
    """

    dtype: np.dtype[np.generic]
    starts: NDArray[np.int64]
    num_tokens: int


def encode_index(lengths: NDArray[np.int64], *, dtype: str) -> bytes:
    """The bytes of an index over documents of the given lengths, each one sequence and one document.

    Args:
        lengths: Tokens per document, (D,).
        dtype: ``uint8``, ``uint16`` or ``uint32``.

    Raises:
        DataError: When a document has more tokens than the format can say.
    """
    if lengths.size and int(lengths.max()) >= 2**31:
        raise DataError(
            f"A document of {int(lengths.max())} tokens is longer than an index can hold (2^31 - 1); split it."
        )
    pointers = np.zeros(lengths.size, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    documents = np.arange(lengths.size + 1, dtype=np.int64)
    return b"".join(
        (
            _HEADER.pack(MAGIC, 1, _CODE_OF[dtype], lengths.size, documents.size),
            lengths.astype("<i4").tobytes(),
            pointers.astype("<i8").tobytes(),
            documents.astype("<i8").tobytes(),
        )
    )


def write_index(path: Path, lengths: NDArray[np.int64], *, dtype: str) -> str:
    """Write an index at once or not at all; gives its SHA-256 in hexadecimal."""
    return write_whole(path, encode_index(lengths, dtype=dtype))


def read_index(path: Path) -> DocumentIndex:
    """The documents that an index names, also where a document consists of several sequences.

    Raises:
        DataError: When the file is missing, unreadable, of another format or truncated.
    """
    with readable_errors(path, doing="read"):
        content = path.read_bytes()
    if len(content) < _HEADER.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a Megatron index: it does not begin with {MAGIC[:7].decode()}; write it again.")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack_from(content)
    if version != 1:
        raise DataError(f"{path} has version {version} of the index format; only version 1 can be read.")
    if code not in _DTYPE_OF:
        raise DataError(f"{path} has the type number {code}, which is no type for token ids; write it again.")
    needed = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(content) < needed:
        raise DataError(f"{path} is truncated: {len(content)} bytes of at least {needed}; write it again.")
    dtype = np.dtype(_DTYPE_OF[code])
    lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences).astype(np.int64)
    boundaries = np.frombuffer(content, "<i8", num_boundaries, _HEADER.size + 12 * num_sequences).astype(np.int64)
    first = boundaries[:-1]
    if first.size and (int(first.max()) >= num_sequences or int(first.min()) < 0):
        raise DataError(f"{path} is damaged: a document begins beyond the last of {num_sequences} sequences.")
    return DocumentIndex(dtype, pointers[first] // dtype.itemsize, int(lengths.sum()))
