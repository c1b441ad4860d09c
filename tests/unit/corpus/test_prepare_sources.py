"""Which files are read, and how they are divided."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_pretrain.corpus.documents import Document, Unusable, read_documents
from lit_pretrain.corpus.sources import Piece, Reading, find_inputs, plan_units, unit_size
from lit_pretrain.errors import ConfigError, DataError

READING = Reading()


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def names(*inputs: Path | str, format: str | None = None) -> list[str]:
    return [file.name for file in find_inputs(list(map(str, inputs)), format=format, reading=READING).files]


def texts(path: Path | str, reading: Reading = READING, *, unit_bytes: int = 10**9) -> list[str]:
    """Every document, through the plan."""
    found = find_inputs([str(path)], format=None, reading=reading)
    units = plan_units(found.files, reading=reading, unit_bytes=unit_bytes)
    read = (d for unit in units for piece in unit for d in read_documents(piece, reading=reading))
    return [d.text if isinstance(d, Document) else f"<{d.reason}>" for d in read]


def test_folders_globs_and_files_each_once_in_order(tmp_path: Path) -> None:
    write(
        tmp_path, dict.fromkeys(["b.txt", "a/2.jsonl", "a/10.jsonl", ".hidden/x.txt", "a/.x.txt", "r.md", "s.md"], "{}")
    )
    assert names(tmp_path) == ["a/10.jsonl", "a/2.jsonl", "b.txt"]
    assert find_inputs([str(tmp_path)], format=None, reading=READING).left_out == {".md": 2}
    assert names(tmp_path / "b.txt", tmp_path, tmp_path / "a" / "*.jsonl") == ["b.txt", "a/10.jsonl", "a/2.jsonl"]
    assert names(tmp_path / "**" / "2.*") == ["2.jsonl"]
    assert names(tmp_path / "r.md", format="text") == ["r.md"]
    assert names(tmp_path, format="text") == ["a/10.jsonl", "a/2.jsonl", "b.txt", "r.md", "s.md"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, {"a[1].txt": "x", "a1.txt": "y"})
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_any_file_system() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/prepare-test/a.txt": b"one", "/prepare-test/sub/b.jsonl": b'{"text": "two"}\n'})
    try:
        assert names("memory://prepare-test") == ["a.txt", "sub/b.jsonl"]
        assert texts("memory://prepare-test") == ["one", "two"]
        assert texts("memory://prepare-test/**/b.*") == ["two"]
    finally:
        fs.rm("/prepare-test", recursive=True)


@pytest.mark.parametrize(
    ("given", "format", "words"),
    [
        ("absent.txt", None, "input=.*absent.txt does not exist"),
        ("*.none", None, "matches no file"),
        ("empty", None, "holds no files"),
        ("r.md", None, "r.md is of unknown kind .*format="),
        ("bad.parquet", None, "bad.parquet is not a Parquet file"),
        ("nosuch://x/y", None, "input=.*nosuch.* cannot be opened"),
    ],
)
def test_refusals(tmp_path: Path, given: str, format: str | None, words: str) -> None:
    write(tmp_path, {"r.md": "x", "bad.parquet": b"PAR1 something else PAR1"})
    (tmp_path / "empty").mkdir()
    path = given if "://" in given else str(tmp_path / given)
    with pytest.raises(ConfigError, match=words):
        plan_units(find_inputs([path], format=format, reading=READING).files, reading=READING, unit_bytes=10)


def test_nothing_given() -> None:
    with pytest.raises(ConfigError, match="input is empty"):
        names()


def test_units_depend_on_sizes_alone(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x" * 25, "b.txt": "x" * 25, "c.jsonl": "x" * 120, "d.jsonl.gz": b"x" * 500})
    files = find_inputs([str(tmp_path)], format=None, reading=READING).files
    units = [
        [(Path(piece.path).name, piece.start, piece.end) for piece in unit]
        for unit in plan_units(files, reading=READING, unit_bytes=50)
    ]
    assert units == [
        [("a.txt", 0, None), ("b.txt", 0, None)],
        [("c.jsonl", 0, 50)],
        [("c.jsonl", 50, 100)],
        [("c.jsonl", 100, 150)],
        [("d.jsonl.gz", 0, None)],  # cannot be divided
    ]


def test_the_size_of_a_unit() -> None:
    assert unit_size(0) == unit_size(10**9) == 16 * 2**20
    assert unit_size(2**38) == 2**28
    assert unit_size(2**50) == 2**30


@pytest.mark.parametrize("unit_bytes", [1, 7, 10**6])
def test_documents_of_text_files(tmp_path: Path, unit_bytes: int) -> None:
    write(tmp_path, {"a.txt": "\ufefffirst\r\nsecond\n\n\nthird\n", "b.txt": "fourth"})
    assert texts(tmp_path, unit_bytes=unit_bytes) == ["first\r\nsecond\n\n\nthird\n", "fourth"]
    lines = texts(tmp_path, Reading(documents="line"), unit_bytes=unit_bytes)
    assert lines == ["first", "second", "<empty>", "<empty>", "third", "fourth"]
    blocks = texts(tmp_path, Reading(documents="separator", separator="\n\n"), unit_bytes=unit_bytes)
    assert blocks == ["first\r\nsecond", "\nthird\n", "fourth"]


@pytest.mark.parametrize("unit_bytes", [1, 40, 10**6])
def test_json_lines_and_what_is_wrong_with_them(tmp_path: Path, unit_bytes: int) -> None:
    lines = [
        json.dumps({"text": "plain", "id": 1}).encode(),
        json.dumps({"text": "漢字\nin two lines"}).encode(),
        b'{"text": "caf\xe9"}',
        b'{"text": "half',
        b"[1, 2]",
        b'{"content": "x", "id": 2}',
        b'{"text": 7}',
        b'{"text": "\\ud800"}',
        b'{"text": " \\n"}',
        b"",
        json.dumps({"text": "x" * 101}).encode(),
        json.dumps({"text": "last", "other": "x" * 200}).encode(),
        json.dumps({"text": "long line", "other": "x" * 1000}).encode(),
    ]
    write(tmp_path, {"a.jsonl": b"\n".join(lines)})
    assert texts(tmp_path, Reading(max_document_bytes=100), unit_bytes=unit_bytes) == [
        "plain",
        "漢字\nin two lines",
        "<not UTF-8>",
        "<not JSON>",
        "<not a JSON object>",
        "<without the text key>",
        "<not a text>",
        "<half a surrogate pair>",
        "<empty>",
        "<empty>",
        "<too long>",
        "last",
        "<too long>",
    ]


def test_what_is_said_of_an_unusable_document(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "x"}\n{"content": 1, "id": 2}\n'})
    piece = Piece(path=str(tmp_path / "a.jsonl"), kind="jsonl", size=1)
    _, found = read_documents(piece, reading=READING)
    assert found == Unusable("without the text key", f"{tmp_path}/a.jsonl, byte 14", "its keys are 'content', 'id'")


def test_a_damaged_archive_gives_what_can_be_read(tmp_path: Path) -> None:
    import gzip

    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(100_000))
    write(tmp_path, {"a.jsonl.gz": gzip.compress(lines)[:-2000]})
    found = texts(tmp_path)
    assert found[0] == "0"
    assert found[-1] == "<end of a damaged file>"


def test_columns_of_parquet(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(10)]
    table = pa.table({"id": list(range(10)), "text": [*rows[:3], None, *rows[4:]], "bytes": [r.encode() for r in rows]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    found = find_inputs([str(tmp_path)], format=None, reading=READING)
    assert len(plan_units(found.files, reading=READING, unit_bytes=1)) == 3
    for unit_bytes in (1, 10**6):
        assert texts(tmp_path, unit_bytes=unit_bytes) == [*rows[:3], "<not a text>", *rows[4:]]
    assert texts(tmp_path, Reading(text_key="bytes")) == rows
    with pytest.raises(DataError, match=r"no column 'body' \(text_key\); it has 'id', 'text', 'bytes'"):
        texts(tmp_path, Reading(text_key="body"))


def test_a_column_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    column = pa.array([b"good", b"caf\xe9", b"again"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(tmp_path) == ["good", "<not UTF-8>", "again"]


def test_datasets_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {number}" for number in range(1000)]
    dataset = datasets.Dataset.from_dict({"text": rows, "id": list(range(1000))})
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([5, 3])}).save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "one") == rows
    assert texts(tmp_path / "one", unit_bytes=1000) == rows
    (file,) = find_inputs([str(tmp_path / "one")], format=None, reading=READING).files
    for unit_bytes in (1000, 10**9):
        units = plan_units([file], reading=READING, unit_bytes=unit_bytes)
        assert 0.95 * file.size <= sum(piece.size for unit in units for piece in unit) <= file.size
    assert texts(tmp_path / "two", Reading(dataset_split="test")) == ["row 5", "row 3"]
    for reading, words in (
        (Reading(dataset_split="dev"), "dataset_split=dev is not in .*; it has train, test"),
        (Reading(text_key="body"), r"no column 'body' \(text_key\); it has 'text', 'id'"),
    ):
        with pytest.raises(ConfigError, match=words):
            texts(tmp_path / "two", reading)
    write(tmp_path / "broken", {"dataset_info.json": "{"})
    with pytest.raises(DataError, match="cannot be loaded as a Hugging Face dataset"):
        texts(tmp_path / "broken")


@pytest.mark.parametrize("given", ["hf://somebody/something", "saved"])
def test_the_missing_package_for_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    write(tmp_path / "saved", {"dataset_info.json": "{}"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"lit-pretrain\[hf\]"):
        texts(given if "://" in given else tmp_path / given)


def test_the_missing_package_for_zstandard_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "x"}', "b.jsonl.zst": b"x"})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"lit-pretrain\[curate\]"):
        names(tmp_path)
