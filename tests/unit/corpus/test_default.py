"""The default corpus: what it takes, how it splits, and that it is made once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_pretrain.corpus import DefaultCorpus, Manifest, TokenizerFile, open_tokens, split_documents, verify_folder
from lit_pretrain.corpus.domains import is_prose, list_code, list_prose, read_code, read_prose
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.specs import CorpusProvider

PROSE = "This module reads a file and gives its lines one after another, until the end of the file or an error comes."


def small(cache: Path, **settings: object) -> DefaultCorpus:
    return DefaultCorpus(**({"max_bytes": 150_000, "vocab_size": 300, "cache_dir": cache} | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    small(folder).prepare()
    return folder


def test_what_lies_in_the_cache(cache: Path) -> None:
    corpus = small(cache)
    assert isinstance(corpus, CorpusProvider)
    found = corpus.locate()
    assert found.tokenizer is not None
    assert list(found.train) == list(found.validation) == ["code", "english"]
    tokenizer = TokenizerFile(found.tokenizer)
    folders = [*found.train.values(), *found.validation.values()]
    for folder in folders:
        manifest = verify_folder(folder)
        assert manifest.vocab_size == tokenizer.vocab_size == 300
        assert manifest.tokenizer_hash == tokenizer.content_hash
        assert manifest.eos_id == tokenizer.eos_id
        stream = open_tokens(folder)
        ids = stream.piece(0, stream.num_tokens)
        assert (ids == tokenizer.eos_id).sum() == manifest.num_documents
        assert int(tokenizer.token_bytes()[ids].sum()) == manifest.num_bytes
    # nothing but the folder and its lock: no half-made folder
    assert {path.suffix for path in cache.iterdir()} <= {"", ".lock"}


def documents(folder: Path, tokenizer: TokenizerFile) -> list[str]:
    stream = open_tokens(folder)
    ids = stream.piece(0, stream.num_tokens).tolist()
    bounds = [*stream.document_starts.tolist(), len(ids)]
    return [tokenizer.decode(ids[low:high]) for low, high in itertools.pairwise(bounds)]


def test_documents_are_real_and_on_one_side_only(cache: Path) -> None:
    found = small(cache).locate()
    assert found.tokenizer is not None
    tokenizer = TokenizerFile(found.tokenizer)
    library = {text for file in list_code() for text in read_code(file)}
    train, held_out = documents(found.train["code"], tokenizer), documents(found.validation["code"], tokenizer)
    assert set(train) | set(held_out) <= library
    everything = [
        text
        for part in (found.train, found.validation)
        for folder in part.values()
        for text in documents(folder, tokenizer)
    ]
    assert len(everything) == len(set(everything))
    assert all(len(text.split()) >= 20 for text in documents(found.train["english"], tokenizer))


def test_preparing_again_is_free_and_settings_are_part_of_the_name(cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert small(cache).prepare() == small(cache).locate()
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == before
    for other in ({"vocab_size": 301}, {"max_bytes": 150_001}, {"validation_fraction": 0.06}, {"domains": ["code"]}):
        with pytest.raises(DataError, match=r"call prepare\(\) first"):
            small(cache, **other).locate()


def test_the_same_bytes_again(cache: Path, tmp_path: Path) -> None:
    first, second = small(cache).locate(), small(tmp_path).prepare()
    for name in ("code", "english"):
        a, b = Manifest.load(first.train[name]), Manifest.load(second.train[name])
        assert [shard.bin_sha256 for shard in a.shards] == [shard.bin_sha256 for shard in b.shards]


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from lit_pretrain.corpus import DefaultCorpus
        corpus = DefaultCorpus(domains=["code"], max_bytes=60_000, vocab_size=300, cache_dir=sys.argv[1])
        print(corpus.prepare().train["code"])
        """
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    outcomes = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outcomes
    assert len({out for out, _ in outcomes}) == 1
    assert sum("training the tokenizer" in said for _, said in outcomes) == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    corpus = small(tmp_path, domains=["code"])
    with monkeypatch.context() as patch:
        patch.setattr("lit_pretrain.corpus.default.write_whole", interrupt)  # the very last file
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(DataError, match="not in"):
        corpus.locate()


def damage_ids(folder: Path) -> None:
    """Other ids, as many as before: only a checksum can tell."""
    path = folder / "code-train" / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def truncate_ids(folder: Path) -> None:
    path = folder / "english-validation" / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])


DAMAGES = {
    "ids": damage_ids,
    "truncated": truncate_ids,
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "manifest": lambda folder: (folder / "code-validation" / "manifest.json").unlink(),
    "index": lambda folder: (folder / "code-train" / "shard-00000.idx").write_bytes(b"MMIDIDX"),
    "folder": lambda folder: shutil.rmtree(folder / "english-train"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("ids", "manifest") else [pytest.mark.slow]) for k in DAMAGES]
)
def test_a_damaged_cache_is_set_aside_and_made_anew(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (whole,) = (path for path in cache.iterdir() if path.is_dir())
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    DAMAGES[kind](folder)
    damaged = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if kind != "ids":
        with pytest.raises(DataError, match=rf"{folder} cannot be used: .*\. Call prepare\(\) .*delete that folder\.$"):
            small(tmp_path).locate()
    small(tmp_path).prepare()
    said = capsys.readouterr().err
    assert f"The default corpus in {folder} is damaged: " in said.replace("\n", "")
    (aside,) = tmp_path.glob("*.damaged-*")
    assert str(aside) in said
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == damaged
    for path in (path for path in whole.rglob("*") if path.is_file()):
        assert (folder / path.relative_to(whole)).read_bytes() == path.read_bytes()
    small(tmp_path).prepare()
    assert capsys.readouterr().err == "", "what is whole is left alone"


def test_a_cache_that_may_not_be_read_is_not_damaged(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = (path for path in cache.iterdir() if path.is_dir())
    shutil.copytree(whole, tmp_path / whole.name)

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # permissions do not bind the superuser, who may run this
    with pytest.raises(DataError, match=r"No permission to read .*; change its permissions"):
        small(tmp_path).prepare()
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_PRETRAIN_CACHE", str(tmp_path / "a"))
    assert DefaultCorpus().cache_dir == tmp_path / "a"
    assert DefaultCorpus(cache_dir=tmp_path / "b").cache_dir == tmp_path / "b"
    monkeypatch.delenv("LIT_PRETRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DefaultCorpus().cache_dir == tmp_path / ".cache" / "lit-pretrain"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Could not write .*file"):
        small(tmp_path / "file" / "cache").prepare()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"domains": []}, "at least one domain"),
        ({"domains": ["code", "code"]}, "each once"),
        ({"domains": ["poems"]}, "'poems', which is unknown; use code or english"),
        ({"vocab_size": 256}, "vocab_size=256"),
        ({"vocab_size": 2048.0}, "vocab_size=2048.0"),
        ({"validation_fraction": 0}, "validation_fraction=0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_bad_settings(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DefaultCorpus(**settings)  # type: ignore[arg-type]


@given(st.lists(st.text(max_size=5), max_size=30), st.floats(0.01, 0.99))
def test_splits_are_decided_by_content(texts: list[str], fraction: float) -> None:
    split = split_documents(texts, validation_fraction=fraction)
    assert sorted(split["train"] + split["validation"]) == sorted(texts)
    assert not set(split["train"]) & set(split["validation"])
    if len(set(texts)) > 1:
        assert split["train"]
        assert split["validation"]


def test_split_fraction() -> None:
    split = split_documents([str(number) for number in range(4000)], validation_fraction=0.1)
    # binomial: standard deviation 19; 5 of them
    assert abs(len(split["validation"]) - 400) < 95


def write(root: Path, name: str, text: str | bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_which_code_is_read(tmp_path: Path) -> None:
    write(tmp_path, "b.py", "x = 1\n")
    write(tmp_path, "a/c.py", "y = 2\n")
    write(tmp_path, "latin.py", b"# caf\xe9\n")
    write(tmp_path, "empty.py", " \n")
    for left_out in ("test/t.py", "a/tests/t.py", "site-packages/p.py", "encodings/cp1.py", "notes.txt"):
        write(tmp_path, left_out, "z = 3\n")
    write(tmp_path, "table.py", "0," * 300_000)
    os.symlink(tmp_path / "gone.py", tmp_path / "dangling.py")
    files = list_code(tmp_path)
    assert [file.name for file in files] == ["a/c.py", "b.py", "empty.py", "latin.py"]
    assert [read_code(file) for file in files] == [["y = 2\n"], ["x = 1\n"], [], []]


def test_which_prose_is_read(tmp_path: Path) -> None:
    quote = '"""'
    body = f"{quote}{PROSE}{quote}\nclass A:\n    {quote}{PROSE} First.\n\n    Not.\n      Indented.\n    {quote}\n"
    short = f"    def f(self):\n        {quote}Too short.{quote}\n"
    method = f"{short}    async def g(self):\n        {quote}{PROSE} G.{quote}\n"
    write(tmp_path, "p/a.py", body + method)
    write(tmp_path, "p/broken.py", f"{quote}{PROSE}{quote}\ndef (:\n")
    write(tmp_path, "p/tests/t.py", body)
    write(tmp_path, "lit_pretrain/x.py", body)
    files = list_prose([tmp_path])
    assert sorted(file.name for file in files) == ["p/a.py", "p/broken.py"]
    read = [text for file in files for text in read_prose(file)]
    assert read == [PROSE, f"{PROSE} First.\n\nNot.\n  Indented.", f"{PROSE} G."]


def test_prose_has_plain_words() -> None:
    assert is_prose(PROSE)
    assert not is_prose("Too few words.")
    assert not is_prose(PROSE + "\n>>> f(1)\n1")
    assert not is_prose("x = 3; y[2] = f(x) " * 10)


def test_report_of_the_build(cache: Path) -> None:
    report = json.loads((small(cache).locate().train["code"].parent / "corpus.json").read_text())
    assert set(report) == {"code-train", "code-validation", "english-train", "english-validation"}
    assert report["code-train"]["tokens"] == open_tokens(small(cache).locate().train["code"]).num_tokens
