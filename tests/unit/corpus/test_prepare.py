"""A preparation: every document once, the same bytes however it was worked on, gone on with after an interruption."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_pretrain.corpus import TokenizerFile, open_tokens, train_tokenizer, verify_folder
from lit_pretrain.corpus import prepare as module
from lit_pretrain.corpus.manifest import Manifest
from lit_pretrain.corpus.prepare import Prepared, PrepareSettings, prepare
from lit_pretrain.corpus.sources import Reading
from lit_pretrain.errors import ConfigError, DataError

FRACTION = 0.25


def documents(number: int = 60, *, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(100)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 60))) + f" é漢 {i}\n" for i in range(number)]


def write_input(folder: Path) -> Path:
    """Two JSONL files and a folder of text files."""
    texts = documents()
    (folder / "text").mkdir(parents=True)
    for number, text in enumerate(texts[40:]):
        (folder / "text" / f"{number:02d}.txt").write_text(text)
    for name, some in (("a.jsonl", texts[:30]), ("b.jsonl", texts[30:40])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return folder


def settings(folder: Path, output: Path, **changes: Any) -> PrepareSettings:
    values: dict[str, Any] = {
        "input": [str(folder)],
        "output": output,
        "vocab_size": 300,
        "validation_fraction": FRACTION,
        "unit_bytes": 3000,
        "workers": 0,
    }
    return PrepareSettings(**{**values, **changes})


def tree(folder: Path) -> dict[str, str]:
    """Every file's checksum."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents in a split, from the ids on disk."""
    tokenizer = TokenizerFile(folder / "tokenizer.json")
    ids = open_tokens(folder / split).piece(0, 10**9).astype(np.int64)
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    assert ends[-1] == ids.size - 1
    return [tokenizer.decode(some[some != tokenizer.eos_id].tolist()) for some in np.split(ids, ends[:-1] + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("input") / "in")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Prepared:
    return prepare(settings(folder, tmp_path_factory.mktemp("output") / "out"))


def test_every_document_once_in_order_on_its_side(done: Prepared) -> None:
    def held_out(text: str) -> bool:
        mark = int(hashlib.sha256(b"split" + text.encode()).hexdigest()[:16], 16)
        return mark < FRACTION * 2**64

    expected = documents()
    assert texts_of(done.folder, "train") == [text for text in expected if not held_out(text)]
    assert texts_of(done.folder, "validation") == [text for text in expected if held_out(text)]


def test_what_the_record_counts(done: Prepared) -> None:
    for split, numbers in done.record["splits"].items():
        texts = texts_of(done.folder, split)
        assert numbers["documents"] == len(texts)
        assert numbers["bytes"] == sum(len(text.encode()) for text in texts)
        assert numbers["tokens"] == open_tokens(done.folder / split).num_tokens
        assert numbers["shards"] == len(list((done.folder / split).glob("*.bin")))
        verify_folder(done.folder / split)
    assert done.record["splits"]["train"]["shards"] > 3
    assert done.encoded_bytes == sum(len(text.encode()) for text in documents())
    assert done.record["skipped"] == {}
    assert json.loads((done.folder / "prepare.json").read_text()) == done.record


def test_nothing_else_is_left(done: Prepared) -> None:
    assert {path.name for path in done.folder.iterdir()} == {"train", "validation", "tokenizer.json", "prepare.json"}


def test_a_second_run_does_nothing(done: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folder.rglob("*")}
    (done.folder / ".parts").mkdir()  # as a kill just before the end leaves it
    again = prepare(settings(folder, done.folder))
    assert not again.fresh
    assert again.record == done.record
    after = {path: path.stat().st_mtime_ns for path in done.folder.rglob("*")}
    before.pop(done.folder, None)
    after.pop(done.folder, None)
    assert before == after


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_bytes_whatever_the_number_of_workers(
    tmp_path: Path, done: Prepared, folder: Path, workers: int
) -> None:
    prepare(settings(folder, tmp_path / "out", workers=workers))
    assert tree(tmp_path / "out") == tree(done.folder)


def test_other_units_give_the_same_tokens(tmp_path: Path, done: Prepared, folder: Path) -> None:
    tokenizer = str(done.folder / "tokenizer.json")
    other = prepare(settings(folder, tmp_path / "out", unit_bytes=None, tokenizer=tokenizer))
    assert other.record["splits"]["train"]["shards"] == 1
    for split in ("train", "validation"):
        one, two = (open_tokens(some / split) for some in (done.folder, tmp_path / "out"))
        np.testing.assert_array_equal(one.piece(0, 10**9), two.piece(0, 10**9))
        np.testing.assert_array_equal(one.document_starts, two.document_starts)


def interrupted_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Stop encoding after so many units, as a kill does."""
    encode = module.encode_units

    def some(*args: Any, **kwargs: Any) -> Iterator[int]:
        for done, unit in enumerate(encode(*args, **kwargs)):
            if done == number:
                raise KeyboardInterrupt
            yield unit

    monkeypatch.setattr(module, "encode_units", some)


def test_an_interrupted_run_goes_on(
    tmp_path: Path, done: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(folder, output))
    assert not (output / "prepare.json").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in (output / ".parts").glob("[0-9]*")}
    assert len(finished) >= 2
    (output / ".parts" / ".000009.1-abc.tmp" / "train").mkdir(parents=True)  # half a unit, left by a kill

    encoded: list[int] = []
    encode = module.encode_units

    def watched(units: Any, **kwargs: Any) -> Iterator[int]:
        encoded.extend(units)
        yield from encode(units, **kwargs)

    monkeypatch.setattr(module, "encode_units", watched)
    monkeypatch.setattr(module, "train_tokenizer", None)  # not trained twice
    assert prepare(settings(folder, output)).fresh
    assert not set(encoded) & {int(name) for name in finished}
    assert tree(output) == tree(done.folder)


@pytest.mark.parametrize("saves", [0, 1])
def test_interrupted_while_the_shards_are_put_together(
    tmp_path: Path, done: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    output = tmp_path / "out"
    save, calls = Manifest.save, []

    def fail(self: Manifest, where: Path) -> None:
        if where.parent == output:
            calls.append(where)
            if len(calls) > saves:
                raise KeyboardInterrupt
        save(self, where)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(folder, output))
    prepare(settings(folder, output))
    assert tree(output) == tree(done.folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 301}, "vocab_size=300, not 301"),
        ({"validation_fraction": 0.5}, "validation_fraction=0.25, not 0.5"),
        ({"unit_bytes": 4000}, "unit_bytes=3000, not 4000"),
        ({"errors": "strict"}, "errors=skip, not strict"),
        ({"reading": Reading(documents="line")}, "documents=file, not line"),
    ],
)
def test_other_settings_are_refused(done: Prepared, folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"was prepared with {words}; choose another folder"):
        prepare(settings(folder, done.folder, **changes))


def test_other_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = write_input(tmp_path / "in"), tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(folder, output))
    (folder / "text" / "03.txt").write_text("something else")
    words = r"holds an unfinished preparation with other input: text/03.txt is new, gone or changed; choose another"
    with pytest.raises(ConfigError, match=words):
        prepare(settings(folder, output))


def test_settings_may_change_while_there_is_nothing_to_lose(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"only .* tokens, vocab_size=5000"):
        prepare(settings(folder, tmp_path / "out", vocab_size=5000))
    assert prepare(settings(folder, tmp_path / "out", vocab_size=300)).fresh


def test_a_tokenizer_changed_half_way_is_noticed(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(folder, output))
    train_tokenizer(documents(seed=5), output / "tokenizer.json", vocab_size=300)
    with pytest.raises(DataError, match=r"tokenizer\.json was changed while shards were made"):
        prepare(settings(folder, output))


@pytest.mark.parametrize("workers", [0, 2])
def test_unusable_documents_are_counted_or_refused(tmp_path: Path, workers: int) -> None:
    lines = [json.dumps({"text": text}).encode() for text in documents(30)]
    lines[20:20] = [b"{", b'{"text": ""}', b'{"text": "\xff"}', b"{"]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    done = prepare(settings(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=257, workers=workers))
    assert sum(split["documents"] for split in done.record["splits"].values()) == 30
    counts = {reason: what["documents"] for reason, what in done.record["skipped"].items()}
    assert counts == {"not JSON": 2, "empty": 1, "not UTF-8": 1}
    place = sum(len(line) + 1 for line in lines[:20])
    assert done.record["skipped"]["not JSON"]["first"] == f"{tmp_path}/a.jsonl, byte {place}"
    with pytest.raises(DataError, match=rf"a\.jsonl, byte {place}: not JSON .*errors=skip"):
        prepare(settings(tmp_path / "a.jsonl", tmp_path / "strict", vocab_size=257, workers=workers, errors="strict"))


def test_empty_documents_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    reading = Reading(documents="line")
    changes = {"vocab_size": 257, "errors": "strict", "reading": reading, "validation_fraction": 0}
    done = prepare(settings(tmp_path / "a.txt", tmp_path / "out", **changes))
    assert texts_of(done.folder, "train") == ["one", "two"]
    assert list(done.record["splits"]) == ["train"]
    assert not (done.folder / "validation").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no document that can be used"),
        ('{"content": 1, "id": 2}\n', "1 without the text key, .*its keys are 'content', 'id'"),
        (" \n\n", "2 empty"),
    ],
)
def test_input_without_documents_leaves_nothing_behind(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=words):
        prepare(settings(tmp_path / "a.jsonl", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_everything_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    tokenizer = train_tokenizer(documents(), tmp_path / "tokenizer.json", vocab_size=300)
    changes = {"tokenizer": str(tokenizer.path), "validation_fraction": 0.999999}
    with pytest.raises(DataError, match="all 1 documents fell to validation"):
        prepare(settings(tmp_path / "a.txt", tmp_path / "out", **changes))


def test_folders_that_hold_something_else(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "mine" / "train").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds train; choose another folder"):
        prepare(settings(folder, tmp_path / "mine"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        prepare(settings(folder, tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"output=.* holds .*a\.jsonl, which is input"):
        prepare(settings(folder, folder))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "prepare.json").write_text("{}")
    with pytest.raises(DataError, match=r"prepare\.json is damaged"):
        prepare(settings(folder, tmp_path / "damaged"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "csv"}, "format=csv is unknown; use text, jsonl, parquet, or null"),
        ({"errors": "ignore"}, "errors=ignore is unknown; use skip, strict"),
        ({"reading": Reading(documents="page")}, "documents=page is unknown"),
        ({"reading": Reading(documents="separator")}, "separator="),
        ({"reading": Reading(separator="x")}, "only with documents=separator"),
        ({"vocab_size": 256}, "vocab_size=256 must be .* at least 257"),
        ({"workers": -1}, "workers=-1 must be"),
        ({"unit_bytes": 0}, "unit_bytes=0 must be"),
        ({"sample_bytes": 1.5}, r"sample_bytes=1\.5 must be"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0 must be"),
        ({"eos_token": "</s>"}, "eos_token=</s>"),
        ({"tokenizer_pattern": "x"}, "tokenizer_pattern"),
    ],
)
def test_impossible_settings(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, tmp_path / "out", **changes)


def test_a_tokenizer_that_rewrites_text_is_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, normalizers

    trained = train_tokenizer(documents(), tmp_path / "tokenizer.json", vocab_size=300)
    tokenizer = Tokenizer.from_file(str(trained.path))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "rewrites.json"))
    prepare(settings(folder, tmp_path / "out", tokenizer=str(tmp_path / "rewrites.json")))
    assert "NOT lossless" in capsys.readouterr().err
    prepare(settings(folder, tmp_path / "out2", tokenizer=str(trained.path)))
    assert " lossless: " in capsys.readouterr().err


def test_the_sample_is_spread_over_the_whole_input(folder: Path, tmp_path: Path) -> None:
    from lit_pretrain.corpus.sources import find_inputs, plan_units

    found = find_inputs([str(folder)], format=None, reading=Reading())
    units = plan_units(found.files, reading=Reading(), unit_bytes=3000)
    sample = list(module._sample(units, settings(folder, tmp_path, validation_fraction=0.0), 1000))
    places = [documents().index(text) for text in sample]
    assert places == sorted(places)
    assert places[0] < 3
    assert places[-1] > 40
    assert 500 < sum(len(text.encode()) for text in sample) < 4000
