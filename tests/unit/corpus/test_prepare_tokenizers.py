"""Other people's tokenizers give the ids that they give elsewhere."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from lit_pretrain.corpus import TokenizerFile, train_tokenizer
from lit_pretrain.corpus.tokenizer_sources import load_tokenizer
from lit_pretrain.errors import ConfigError, DataError

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 3,
    "The quick brown fox isn't lazy, it's 12345 years old. " * 5,
    "naïve 漢字",
]
# As published for cl100k_base.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return train_tokenizer(TEXTS, tmp_path_factory.mktemp("tok") / "tokenizer.json", vocab_size=310)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Trained by the definition: the most frequent pair becomes the next token. Bytes in an order of their own."""
    found = {bytes([byte]): rank for rank, byte in enumerate(sorted(range(256), key=lambda byte: (byte * 7) % 256))}
    words = [[bytes([b]) for b in word.encode()] for text in TEXTS for word in regex.findall(PATTERN, text)]
    while len(found) < 309:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        counts = {pair: times for pair, times in counts.items() if pair[0] + pair[1] not in found}
        best = max(counts, key=lambda pair: (counts[pair], pair))
        found[best[0] + best[1]] = len(found)
        words = [merge(word, best) for word in words]
    found[b"qzqzq"] = 309  # a word that no merges lead to
    return found


def merge(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def by_definition(text: str, ranks: dict[bytes, int]) -> list[int]:
    """What tiktoken does: in each word, merge the neighbours whose union has the lowest rank, leftmost first."""
    ids = []
    for word in regex.findall(PATTERN, text):
        tokens = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks:
            tokens = [word.encode()]
        while len(tokens) > 1:
            unions = [ranks.get(a + b, 10**9) for a, b in itertools.pairwise(tokens)]
            best = min(range(len(unions)), key=lambda i: (unions[i], i))
            if unions[best] == 10**9:
                break
            tokens[best : best + 2] = [tokens[best] + tokens[best + 1]]
        ids += [ranks[token] for token in tokens]
    return ids


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return path


def saved(source: object, folder: Path) -> TokenizerFile:
    (folder / "out.json").write_text(source.content)  # type: ignore[attr-defined]
    return TokenizerFile(folder / "out.json", eos_token=source.eos_token)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, ranks: dict[bytes, int]) -> TokenizerFile:
    folder = tmp_path_factory.mktemp("ranks")
    return saved(load_tokenizer(write_ranks(folder / "own.tiktoken", ranks), pattern=PATTERN), folder)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from([*"\n (),'s12", *TEXTS, "lazy", "years", "qzqzq"])).map("".join)))
def test_ranks_give_the_ids_of_their_definition(converted: TokenizerFile, ranks: dict[bytes, int], text: str) -> None:
    assert converted.encode(text) == by_definition(text, ranks)
    assert converted.decode(converted.encode(text)) == text


def test_the_end_of_a_document_follows_the_ranks(converted: TokenizerFile) -> None:
    assert (converted.eos_id, converted.vocab_size) == (310, 311)
    assert 310 not in converted.encode("<|endoftext|>")


@pytest.mark.parametrize(
    ("name", "eos_id"), [("r50k_base", 50256), ("p50k_base", 50256), ("cl100k_base", 100257), ("o200k_base", 199999)]
)
def test_published_ranks_keep_their_end_of_document(
    tmp_path: Path, ranks: dict[bytes, int], name: str, eos_id: int
) -> None:
    found = saved(load_tokenizer(write_ranks(tmp_path / f"{name}.tiktoken", ranks)), tmp_path)
    assert (found.eos_id, found.vocab_size) == (eos_id, eos_id + 1)
    for text in TEXTS:
        assert found.decode(found.encode(text)) == text
    if name == "cl100k_base":
        assert [found.encode(text) for text in TEXTS] == [by_definition(text, ranks) for text in TEXTS]


def test_the_two_files_of_gpt2(tmp_path: Path, trained: TokenizerFile) -> None:
    model = Tokenizer.from_file(str(trained.path)).model
    assert isinstance(model, models.BPE)
    model.save(str(tmp_path))
    for given_ in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        found = saved(load_tokenizer(given_), tmp_path)
        assert [found.encode(text) for text in TEXTS] == [trained.encode(text) for text in TEXTS]
        assert (found.eos_id, found.vocab_size) == (trained.eos_id, trained.vocab_size)


def test_a_tokenizer_json_stays_as_it_is(trained: TokenizerFile) -> None:
    found = load_tokenizer(trained.path)
    assert found.content == trained.path.read_text()
    assert (found.eos_token, found.origin) == ("<|endoftext|>", "tokenizer.json")


def test_documents_are_never_cut_nor_filled_up(tmp_path: Path, trained: TokenizerFile) -> None:
    tokenizer = Tokenizer.from_file(str(trained.path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=200)
    tokenizer.save(str(tmp_path / "cut.json"))
    found = saved(load_tokenizer(tmp_path / "cut.json"), tmp_path)
    assert [found.encode(text) for text in TEXTS] == [trained.encode(text) for text in TEXTS]


def test_a_hugging_face_folder_says_its_end_of_document(tmp_path: Path, trained: TokenizerFile) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(trained.path), eos_token="<stop>", bos_token="<s>")
    fast.save_pretrained(tmp_path / "folder")
    found = saved(load_tokenizer(tmp_path / "folder"), tmp_path)
    assert found.eos_token == "<stop>"
    assert found.eos_id == fast.eos_token_id
    assert [found.encode(text) for text in TEXTS] == [fast.encode(text, add_special_tokens=False) for text in TEXTS]
    assert load_tokenizer(tmp_path / "folder", eos_token="<|endoftext|>").eos_token == "<|endoftext|>"


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 7, "<|endoftext|>": 9}, merges=[]))
    tokenizer.save(str(tmp_path / "gaps.json"))
    assert TokenizerFile(tmp_path / "gaps.json").vocab_size == 10


def test_refusals(tmp_path: Path, trained: TokenizerFile, ranks: dict[bytes, int]) -> None:
    content = json.loads(trained.path.read_text())
    content["added_tokens"], vocab = [], content["model"]["vocab"]
    vocab["</s>"] = vocab.pop("<|endoftext|>")
    (tmp_path / "one.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "one.json").eos_token == "</s>"
    vocab["<eos>"] = len(vocab)
    (tmp_path / "two.json").write_text(json.dumps(content))
    vocab["!!!"], vocab["!!!!"] = vocab.pop("</s>"), vocab.pop("<eos>")
    (tmp_path / "none.json").write_text(json.dumps(content))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    write_ranks(tmp_path / "unknown.tiktoken", ranks)
    write_ranks(tmp_path / "short.tiktoken", dict(list(ranks.items())[:100]))
    write_ranks(tmp_path / "twice.tiktoken", {**ranks, b"zzz": 5})
    (tmp_path / "text.tiktoken").write_text("hello\n")
    for name, eos_token, kind, words in (
        ("two.json", None, ConfigError, r"several usual ones \(</s>, <eos>\).*eos_token="),
        ("none.json", None, ConfigError, "none of the usual .*eos_token="),
        ("two.json", "<end>", ConfigError, "no token '<end>'.*eos_token="),
        ("broken.json", None, DataError, "not a tokenizer.json"),
        ("empty", None, DataError, "save_pretrained"),
        ("absent", None, DataError, "tokenizer=.*absent does not exist"),
        ("unknown.tiktoken", None, ConfigError, "tokenizer_pattern"),
        ("short.tiktoken", None, DataError, "156 of the 256 bytes"),
        ("twice.tiktoken", None, DataError, "the same rank"),
        ("text.tiktoken", None, DataError, "line 1"),
    ):
        with pytest.raises(kind, match=words):
            load_tokenizer(tmp_path / name, eos_token=eos_token)
    with pytest.raises(ConfigError, match="tokenizer_pattern is for"):
        load_tokenizer(trained.path, pattern="x")
