"""Records of a file, whatever the parts it is read in."""

from __future__ import annotations

import gzip
import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_pretrain.corpus import records
from lit_pretrain.corpus.records import DamagedError, check_separator, open_bytes, split_records
from lit_pretrain.errors import ConfigError, DataError

SEPARATORS = (b"\n", b"\n\n", b"ab", b"aaa")


def parts(content: bytes, separator: bytes, cuts: list[int], *, limit: int = 1000) -> list[tuple[int, bytes | None]]:
    """All records, read part by part."""
    bounds: list[int | None] = [0, *sorted({cut % (len(content) + 1) for cut in cuts} - {0}), None]
    return [
        found
        for start, end in itertools.pairwise(bounds)
        for found in split_records(io.BytesIO(content), separator=separator, start=start or 0, end=end, limit=limit)
    ]


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b"b", b"\n", b"x", b"aa\n\n\n\n\n"]), max_size=60),
    separator=st.sampled_from(SEPARATORS),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    chunk=st.sampled_from([1, 3, 7, 2**20]),
)
def test_any_parts_give_each_record_once(pieces: list[bytes], separator: bytes, cuts: list[int], chunk: int) -> None:
    content = b"".join(pieces)
    expected = content.split(separator)
    if not expected[-1]:
        expected.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        found = parts(content, separator, cuts)
    assert [record for _, record in found] == expected
    assert all(content[offset:].startswith(record) for offset, record in found if record is not None)


def test_a_run_longer_than_what_is_read_back() -> None:
    content = b"a" + b"\n" * 9001 + b"b\n\nc"
    assert parts(content, b"\n\n", [9000]) == parts(content, b"\n\n", [])
    assert parts(content, b"\n\n", [9000])[-2:] == [(9001, b"\nb"), (9005, b"c")]


@pytest.mark.parametrize("chunk", [1, 4, 2**20])
@pytest.mark.parametrize("separator", [b"\n", b"<|>"])
def test_a_long_record_is_read_over(monkeypatch: pytest.MonkeyPatch, chunk: int, separator: bytes) -> None:
    monkeypatch.setattr(records, "_CHUNK", chunk)
    content = separator.join([b"12345", b"1" * 1000, b"123456", b"", b"end"])
    found = list(split_records(io.BytesIO(content), separator=separator, limit=5))
    assert [record for _, record in found] == [b"12345", None, None, b"", b"end"]
    assert [content[offset : offset + 3] for offset, _ in found][:3] == [b"123", b"111", b"123"]
    assert found[-1][0] == len(content) - 3


def test_separators_that_overlap_themselves() -> None:
    for fine in (b"\n", b"\n\n", b"<|endoftext|>", b"\r\n"):
        check_separator(fine)
    with pytest.raises(ConfigError, match="ends as it begins"):
        check_separator(b"--8<--")
    with pytest.raises(ConfigError, match="empty"):
        check_separator(b"")


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_decompresses_by_name(tmp_path: Path, ending: str) -> None:
    content = b"some text\n" * 100_000
    path = tmp_path / f"a.txt{ending}"
    if ending == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as parallel compressors write them
        path.write_bytes(b"".join(zstandard.compress(some) for some in (content[:half], content[half:])))
    else:
        path.write_bytes(gzip.compress(content) if ending else content)
    with open_bytes(str(path)) as file:
        assert file.read() == content
    if ending:
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(DamagedError), open_bytes(str(path)) as file:
            file.read()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"lit-pretrain\[curate\]"), open_bytes(str(tmp_path / "a.zst")):
        pass


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"), open_bytes(str(tmp_path / "a.txt")):
        pass
