"""The tokenizer: exact on any text, the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from lit_pretrain.corpus import TokenizerFile, train_tokenizer
from lit_pretrain.errors import ConfigError, DataError

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 3,
    "The quick brown fox jumps over the lazy dog. " * 5,
    "naïve Ünïcödé 漢字",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return train_tokenizer(TEXTS, tmp_path_factory.mktemp("tok") / "tokenizer.json", vocab_size=300)


def test_vocabulary(tokenizer: TokenizerFile) -> None:
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_id == 0
    assert tokenizer.decode([0]) == ""


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives(tokenizer: TokenizerFile, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


def test_text_cannot_spell_a_special_token(tokenizer: TokenizerFile) -> None:
    text = "before<|endoftext|>after"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text(tokenizer: TokenizerFile) -> None:
    with pytest.raises(DataError, match=r"is not UTF-8 \(character 1\)"):
        tokenizer.encode(b"a\xff".decode(errors="surrogateescape"))  # as a command line gives it


def test_batch_equals_one_by_one(tokenizer: TokenizerFile) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_the_same_file_in_another_process(tokenizer: TokenizerFile, tmp_path: Path) -> None:
    code = (
        "import json, sys; from lit_pretrain.corpus import train_tokenizer;"
        "train_tokenizer(json.loads(sys.argv[1]), sys.argv[2], vocab_size=300)"
    )
    for number in range(2):
        other = tmp_path / f"{number}.json"
        subprocess.run([sys.executable, "-c", code, json.dumps(TEXTS), str(other)], check=True)
        assert other.read_bytes() == tokenizer.path.read_bytes()
        assert TokenizerFile(other).content_hash == tokenizer.content_hash


def test_hash_ignores_layout_and_sees_content(tokenizer: TokenizerFile, tmp_path: Path) -> None:
    content = json.loads(tokenizer.path.read_text())
    (tmp_path / "compact.json").write_text(json.dumps(content))
    assert TokenizerFile(tmp_path / "compact.json").content_hash == tokenizer.content_hash
    content["model"]["merges"].pop()
    (tmp_path / "changed.json").write_text(json.dumps(content))
    assert TokenizerFile(tmp_path / "changed.json").content_hash != tokenizer.content_hash


def test_bytes_with_byte_fallback(tmp_path: Path) -> None:
    # a SentencePiece-like vocabulary: pieces, a word boundary, single bytes
    vocab = {"<|endoftext|>": 0, "▁caf": 1, "é": 2, "<0xF0>": 3, "▁": 4}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "t.json"))
    assert TokenizerFile(tmp_path / "t.json").token_bytes().tolist() == [0, 4, 2, 1, 1]
    assert TokenizerFile(tmp_path / "t.json").token_bytes().dtype == np.int64


def test_errors(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    with pytest.raises(ConfigError, match="vocab_size=256 must be at least 257"):
        train_tokenizer(TEXTS, tmp_path / "a.json", vocab_size=256)
    with pytest.raises(DataError, match="give only"):
        train_tokenizer(TEXTS, tmp_path / "a.json", vocab_size=5000)
    assert not (tmp_path / "a.json").exists()
    with pytest.raises(DataError, match="does not exist"):
        TokenizerFile(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        TokenizerFile(tmp_path / "b.json")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        TokenizerFile(tmp_path / "c.json")
    with pytest.raises(DataError, match="no token '</s>'"):
        TokenizerFile(tokenizer.path, eos_token="</s>")
