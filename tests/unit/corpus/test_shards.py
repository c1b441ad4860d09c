"""Shard folders: their bytes by hand, and every way they can be wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_pretrain.corpus import Manifest, ShardWriter, open_tokens, token_dtype, verify_folder
from lit_pretrain.corpus._files import WholeFile, write_whole
from lit_pretrain.errors import ConfigError, DataError


def small(folder: Path, **settings: int) -> Manifest:
    with ShardWriter(folder, vocab_size=1000, eos_id=7, tokenizer_hash="t", config_hash="c", **settings) as writer:
        writer.add([1, 2, 3], num_bytes=10)
        writer.add([999], num_bytes=4)
        writer.add([], num_bytes=0)
        return writer.close()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**31, "uint32")],
)
def test_smallest_type(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype


def test_bytes_by_hand(tmp_path: Path) -> None:
    small(tmp_path)
    # little-endian 16-bit: 1 2 3 7 | 999 7 | 7
    expected = bytes([1, 0, 2, 0, 3, 0, 7, 0, 0xE7, 3, 7, 0, 7, 0])
    assert (tmp_path / "shard-00000.bin").read_bytes() == expected
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["format"] == "lit-pretrain-shards"
    assert (content["version"], content["dtype"], content["vocab_size"], content["eos_id"]) == (1, "uint16", 1000, 7)
    assert (content["num_tokens"], content["num_documents"], content["num_bytes"]) == (7, 3, 14)
    assert content["shards"][0]["max_id"] == 999
    assert content["shards"][0]["bin_sha256"] == hashlib.sha256(expected).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00000.bin", "shard-00000.idx"]


def test_stream_over_shards_equals_one_array(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(8, 1000, int(random.integers(0, 40))) for _ in range(60)]
    with ShardWriter(tmp_path, vocab_size=1000, eos_id=7, max_shard_tokens=100) as writer:
        for document in documents:
            writer.add(document)
    whole = np.concatenate([np.append(document, 7) for document in documents])
    stream = open_tokens(tmp_path)
    assert stream.num_tokens == whole.size
    assert len(list(tmp_path.glob("*.bin"))) > 5
    for offset in range(0, whole.size, 13):
        for length in (0, 1, 50, 250):
            assert stream.piece(offset, length).tolist() == whole[offset : offset + length].tolist()
    assert stream.document_starts.tolist() == [0, *(np.flatnonzero(whole == 7) + 1)[:-1].tolist()]
    assert stream.scan_max_id() == whole.max()
    assert verify_folder(tmp_path).num_documents == 60


def test_largest_uint32_id(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, vocab_size=70000, eos_id=None) as writer:
        writer.add([69999, 0])
    assert (tmp_path / "shard-00000.bin").read_bytes() == bytes([0x6F, 0x11, 1, 0, 0, 0, 0, 0])
    assert open_tokens(tmp_path).piece(0, 2).tolist() == [69999, 0]


def test_bare_file_finds_documents_by_eos(tmp_path: Path) -> None:
    np.asarray([5, 6, 0, 7, 0, 8], "<u2").tofile(tmp_path / "train.bin")
    assert open_tokens(tmp_path / "train.bin", eos_id=0).document_starts.tolist() == [0, 3, 5]
    assert open_tokens(tmp_path / "train.bin", dtype="uint32").num_tokens == 3
    with pytest.raises(DataError, match="where documents begin"):
        _ = open_tokens(tmp_path / "train.bin").document_starts


def test_a_pair_by_any_of_its_names(tmp_path: Path) -> None:
    small(tmp_path)
    for name in ("shard-00000", "shard-00000.bin", "shard-00000.idx"):
        stream = open_tokens(tmp_path / name)
        assert stream.piece(0, 9).tolist() == [1, 2, 3, 7, 999, 7, 7]
        assert stream.document_starts.tolist() == [0, 4, 6]
        assert stream.info.vocab_size is None


def test_an_interrupted_writer_leaves_no_manifest(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, vocab_size=10, eos_id=0) as writer:
            writer.add([1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"no manifest\.json"):
        open_tokens(tmp_path)


@pytest.mark.parametrize("ids", [[3, 1000], [-1]])
def test_ids_beyond_the_vocabulary_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match="does not fit vocab_size=1000"):
        ShardWriter(tmp_path, vocab_size=1000, eos_id=7).add(ids)


def test_impossible_writers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_id=10 must be"):
        ShardWriter(tmp_path, vocab_size=10, eos_id=10)
    with pytest.raises(ConfigError, match="vocab_size=0 must"):
        ShardWriter(tmp_path, vocab_size=0, eos_id=None)
    with pytest.raises(ConfigError, match="max_shard_tokens=0"):
        ShardWriter(tmp_path, vocab_size=10, eos_id=None, max_shard_tokens=0)
    small(tmp_path)
    with pytest.raises(DataError, match="already holds shards"):
        ShardWriter(tmp_path, vocab_size=10, eos_id=None)
    with pytest.raises(DataError, match=r"Could not write .*shard-00000\.bin"):
        ShardWriter(tmp_path / "shard-00000.bin", vocab_size=10, eos_id=None)


def truncate(folder: Path) -> None:
    path = folder / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])


def halve_an_id(folder: Path) -> None:
    path = folder / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])


def edit(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(content | changes))

    return change


def drop_a_document(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["shards"][0]["num_documents"] = 2
    (folder / "manifest.json").write_text(json.dumps(content))


def text_for_a_number(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["shards"][0]["num_bytes"] = "14"
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "has 6 tokens, manifest.json says 7"),
        (halve_an_id, "not a whole number of uint16 ids"),
        (lambda folder: (folder / "shard-00000.bin").write_bytes(b""), "is empty"),
        (lambda folder: (folder / "shard-00000.bin").unlink(), "does not exist"),
        (lambda folder: (folder / "shard-00000.idx").unlink(), "does not exist"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is damaged"),
        (edit(version=2), "version 2"),
        (edit(dtype="uint8"), "has 14 tokens, manifest.json says 7"),
        (edit(dtype="float32"), "use uint8, uint16 or uint32"),
        (edit(vocab_size=999), "holds the id 999, beyond vocab_size=999"),
        (edit(num_tokens=8), "do not add up to 8 tokens"),
        (edit(vocab_size="1000"), "is damaged .vocab_size is '1000'"),
        (edit(eos_id=1000), "eos_id=1000, beyond vocab_size=1000"),
        (text_for_a_number, "is damaged .num_bytes is '14'"),
        (drop_a_document, "in 3 documents"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    small(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=says):
        open_tokens(tmp_path)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "shard-00000.bin"
    raw = bytearray(path.read_bytes())
    raw[0] ^= 4
    path.write_bytes(raw)
    open_tokens(tmp_path)  # sizes are right
    with pytest.raises(DataError, match=r"shard-00000\.bin does not match the checksum"):
        verify_folder(tmp_path)


def test_other_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_tokens(tmp_path / "nothing")
    with ShardWriter(tmp_path / "empty", vocab_size=10, eos_id=None):
        pass
    with pytest.raises(DataError, match="holds no tokens"):
        open_tokens(tmp_path / "empty")
    small(tmp_path / "a")
    with pytest.raises(DataError, match="vocab_size=1000, not 50257"):
        open_tokens(tmp_path / "a", vocab_size=50257)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="not a whole number of uint16"):
        open_tokens(tmp_path / "odd.bin")
    with pytest.raises(DataError, match="dtype='int16'"):
        open_tokens(tmp_path / "odd.bin", dtype="int16")
    np.zeros(3, np.uint16).tofile(tmp_path / "a" / "shard-00000.bin")
    with pytest.raises(DataError, match="belongs to another index"):
        open_tokens(tmp_path / "a" / "shard-00000.bin")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    small(tmp_path / "a")
    with monkeypatch.context() as patch:  # root may read and write everything, so the refusal is simulated
        patch.setattr(Path, "open", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DataError, match=r"No permission to read .*manifest\.json"):
            open_tokens(tmp_path / "a")
        with pytest.raises(DataError, match=r"No permission to write .*shard-00000\.bin"):
            ShardWriter(tmp_path / "b", vocab_size=10, eos_id=None).add([1])


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    file = WholeFile(tmp_path / "a")
    file.write(b"new and longer")
    assert (tmp_path / "a").read_bytes() == b"old"
    file.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert write_whole(tmp_path / "a", b"new") == hashlib.sha256(b"new").hexdigest()
    assert (tmp_path / "a").read_bytes() == b"new"
