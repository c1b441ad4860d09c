"""Shards of the user's own: what their settings may be, and whose end of a document counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_pretrain.corpus import ShardFolders, ShardWriter, TokenizerFile, train_tokenizer
from lit_pretrain.data import TokenDataModule
from lit_pretrain.errors import ConfigError, DataError

TEXTS = ["one text of several words", "another one, and more of it"] * 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sources": {}}, "data.corpus.sources is empty"),
        ({"sources": {"a": None}}, "data.corpus.sources.a=None must be the path"),
        ({"sources": {"a": 3}}, "data.corpus.sources.a=3 must be the path"),
        ({"sources": {"a": ""}}, "data.corpus.sources.a='' must be the path"),
        ({"sources": {"a": {"train": "x"}}}, r"data.corpus.sources.a=\{'train': 'x'\} must be the path"),
        ({"sources": ["a"]}, r"data.corpus.sources=\['a'\] must map names to folders"),
        ({"sources": "a"}, "data.corpus.sources='a' must map names to folders"),
        ({"sources": None}, "data.corpus.sources=None must map names to folders"),
        ({"sources": {"a": "x"}, "validation": {"a": None}}, "data.corpus.validation.a=None must be the path"),
        ({"sources": {"a": "x"}, "validation": "x"}, "data.corpus.validation='x' must map names"),
        ({"sources": {"a": "x"}, "validation": {"b": "x"}}, "names 'b', which is not among data.corpus.sources"),
        ({"sources": {"a": "x"}, "tokenizer": 3}, "data.corpus.tokenizer=3 must be the path"),
        ({"sources": {"a": "x"}, "tokenizer": "t", "eos_id": 1}, "already says vocab_size and eos_id"),
        ({"sources": {"a": "x"}, "dtype": "int64"}, "data.corpus.dtype='int64'"),
        ({"sources": {"a": "x"}, "eos_token": None}, "data.corpus.eos_token=None must be the text"),
        ({"sources": {"a": "x"}, "eos_token": ""}, "data.corpus.eos_token='' must be the text"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ShardFolders(**settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with two tokens that could end a document: 0, and 280 as ``</s>``."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, path, vocab_size=280)
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 280, "content": "</s>"})
    path.write_text(json.dumps(content))
    return path


def write(folder: Path, tokenizer: TokenizerFile, *, eos_id: int) -> Path:
    with ShardWriter(
        folder, vocab_size=tokenizer.vocab_size, eos_id=eos_id, tokenizer_hash=tokenizer.content_hash
    ) as writer:
        for text in TEXTS:
            writer.add(tokenizer.encode(text), num_bytes=len(text.encode()))
    return folder


def test_another_end_of_document_is_honoured_everywhere(tmp_path: Path, two_ends: Path) -> None:
    tokenizer = TokenizerFile(two_ends, eos_token="</s>")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (280, 281)
    folder = write(tmp_path / "a", tokenizer, eos_id=280)
    corpus = ShardFolders(sources={"a": folder}, validation={"a": folder}, tokenizer=two_ends, eos_token="</s>")
    assert corpus.locate().eos_token == corpus.prepare().eos_token == "</s>"
    data = TokenDataModule(corpus, sequence_length=4, micro_batch_size=2, global_batch_size=2, isolate_documents=True)
    data.setup("fit")
    assert data.tokenizer is not None
    assert data.tokenizer.eos_id == 280
    assert data.token_bytes is not None
    assert data.token_bytes[280] == 0
    batch = next(iter(data.val_dataloader()))  # type: ignore[arg-type]
    ends, starts = (batch["ids"][:, :-1] == 280), batch["positions"][:, 1:] == 0
    assert bool((ends == starts).all()), "a document begins after each end and nowhere else"


def test_shards_that_end_their_documents_otherwise_are_refused(tmp_path: Path, two_ends: Path) -> None:
    folder = write(tmp_path / "a", TokenizerFile(two_ends), eos_id=280)
    corpus = ShardFolders(sources={"a": folder}, tokenizer=two_ends)
    with pytest.raises(
        DataError, match=r"eos_token=<\|endoftext\|> is the id 0, .*a end with the id 280; set .*=</s>\.$"
    ):
        corpus.locate()


def test_a_token_that_the_tokenizer_lacks(tmp_path: Path, two_ends: Path) -> None:
    folder = write(tmp_path / "a", TokenizerFile(two_ends), eos_id=0)
    with pytest.raises(DataError, match="no token '<eos>'"):
        ShardFolders(sources={"a": folder}, tokenizer=two_ends, eos_token="<eos>").locate()
