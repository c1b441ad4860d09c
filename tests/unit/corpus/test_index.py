"""The index against its format, taken apart by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from lit_pretrain.corpus.index import encode_index, read_index, write_index
from lit_pretrain.errors import DataError


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("uint8", 1, 1), ("uint16", 8, 2), ("uint32", 4, 4)])
def test_bytes_field_by_field(dtype: str, code: int, itemsize: int) -> None:
    raw = encode_index(np.asarray([5, 1, 7]), dtype=dtype)
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", raw, 9) == (1, code, 3, 4)
    assert struct.unpack_from("<3i", raw, 34) == (5, 1, 7)
    assert struct.unpack_from("<3q", raw, 46) == (0, 5 * itemsize, 6 * itemsize)
    assert struct.unpack_from("<4q", raw, 70) == (0, 1, 2, 3)
    assert len(raw) == 102


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    # 4 sequences of 2, 3, 4 and 1 tokens; documents are sequences 0-1, 2 and 3
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 4)
    body = struct.pack("<4i", 2, 3, 4, 1) + struct.pack("<4q", 0, 4, 10, 18) + struct.pack("<4q", 0, 2, 3, 4)
    (tmp_path / "a.idx").write_bytes(header + body)
    index = read_index(tmp_path / "a.idx")
    assert index.starts.tolist() == [0, 5, 9]
    assert index.num_tokens == 10
    assert index.dtype == np.uint16


def test_round_trip_and_no_documents(tmp_path: Path) -> None:
    write_index(tmp_path / "a.idx", np.asarray([3, 4]), dtype="uint16")
    assert read_index(tmp_path / "a.idx").starts.tolist() == [0, 3]
    write_index(tmp_path / "none.idx", np.asarray([], np.int64), dtype="uint16")
    assert read_index(tmp_path / "none.idx").starts.tolist() == []


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not a Megatron index"),
        (b"something else that is long enough for a header", "not a Megatron index"),
        (encode_index(np.asarray([5, 1]), dtype="uint16")[:-1], "truncated"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 0, 1) + bytes(8), "version 2"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 6, 0, 1) + bytes(8), "type number 6"),
        (
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iq2q", 3, 0, 7, 8),
            "beyond the last of 1 sequences",
        ),
    ],
)
def test_damaged(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match=says):
        read_index(tmp_path / "a.idx")


def test_document_beyond_int32() -> None:
    with pytest.raises(DataError, match="2147483648 tokens"):
        encode_index(np.asarray([2**31]), dtype="uint16")
