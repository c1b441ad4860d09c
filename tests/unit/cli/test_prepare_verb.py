"""The words of ``lit-pretrain prepare``, and the words it tells for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lit_pretrain.cli.prepare import overrides, prepare_arguments, settings_of, summary
from lit_pretrain.corpus.prepare import Prepared, PrepareSettings
from lit_pretrain.corpus.sources import Reading
from lit_pretrain.errors import ConfigError


def composed(*words: str) -> PrepareSettings:
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        plain: Any = OmegaConf.to_container(compose("prepare", prepare_arguments(words)), resolve=True)
    return settings_of(plain)


def prepared(folder: Path, **changes: Any) -> Prepared:
    numbers = {"documents": 1200, "bytes": 4096, "tokens": 1024, "shards": 2}
    record = {
        "splits": {"train": numbers, "validation": numbers},
        "skipped": {},
        "tokenizer": {"eos_token": "<|endoftext|>", "eos_id": 0, "vocab_size": 300},
    }
    return Prepared(folder=folder, record=record | changes, fresh=True, seconds=2.0, encoded_bytes=10**7)


def test_the_defaults_of_the_file_are_those_of_the_class() -> None:
    assert composed("input=a.txt", "output=out") == PrepareSettings(input=["a.txt"], output=Path("out"))


@pytest.mark.parametrize(
    ("word", "inputs"),
    [
        ("input=a.txt", ["a.txt"]),
        ("input=a b.txt,c/*.jsonl", ["a b.txt", "c/*.jsonl"]),
        ("input=s3://bucket/x=1/part-{0..9}.parquet", ["s3://bucket/x=1/part-{0..9}.parquet"]),
        ("input=[a.txt,'b,c.txt']", ["a.txt", "b,c.txt"]),
        ("input=hf://somebody/something", ["hf://somebody/something"]),
    ],
)
def test_inputs_as_one_writes_them(word: str, inputs: list[str]) -> None:
    assert composed(word, "output=out").input == inputs


def test_the_other_words() -> None:
    words = ["format=text", "documents=separator", r"separator=\n--8<--\t", "tokenizer=my tok,1.json", "eos_token=</s>"]
    found = composed("input=a", "output=out", *words, "workers=3", "errors=strict", "dataset_split=dev")
    assert found.reading == Reading(documents="separator", separator="\n--8<--\t", dataset_split="dev")
    assert (found.format, found.tokenizer, found.eos_token) == ("text", "my tok,1.json", "</s>")
    assert (found.workers, found.errors) == (3, "strict")
    assert composed("input=a", "output=out", "eos_token=null").eos_token is None


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("input=[1,2]", r"input=\[1, 2\] must be a path"),
        ("input=a,,b", "must be a path"),
        ("output=s3://bucket/x", "output=s3://bucket/x must be a folder on this machine"),
        ("text_key=7", "text_key=7 must be a text"),
        ("errors=ignore", "errors=ignore is unknown"),
        ("format=csv", "format=csv is unknown"),
    ],
)
def test_wrong_words(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        composed(*(w for w in ("input=a", "output=out") if w.partition("=")[0] != word.partition("=")[0]), word)


@pytest.mark.parametrize("name", ["web", "a b", "it's (1), {x}", "007", "null"])
def test_training_finds_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    tokenizer = {"eos_token": "</s>", "eos_id": 5, "vocab_size": 300}
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        config = compose("train", [*overrides(prepared(folder, tokenizer=tokenizer)), "length.steps=1"])
    assert list(config.data.corpus.sources.values()) == [f"{folder}/train"]
    assert list(config.data.corpus.validation.values()) == [f"{folder}/validation"]
    assert config.data.corpus.tokenizer == f"{folder}/tokenizer.json"
    assert (config.data.corpus.eos_token, config.model.vocab_size) == ("</s>", 300)


def test_the_summary(tmp_path: Path) -> None:
    skipped = {"empty": {"documents": 3000, "first": "a.txt", "detail": ""}}
    lines = summary(prepared(tmp_path / "web", skipped=skipped))
    assert lines[0] == "train: 1.2K documents, 4.0 KiB, 1.02K tokens (0.250 per byte) in 2 shards"
    assert "left out: 3K documents, MORE THAN WAS USED: 3000 empty, first a.txt" in lines
    assert "encoded 9.5 MiB of text in 2s: 5.0 MB/s" in lines
    assert lines[-1] == (
        f'  lit-pretrain train data=shards data.corpus.sources="{{web: {tmp_path}/web/train}}" '
        f'data.corpus.validation="{{web: {tmp_path}/web/validation}}" '
        f"data.corpus.tokenizer={tmp_path}/web/tokenizer.json model.vocab_size=300 length.epochs=1"
    )


def test_the_summary_without_validation(tmp_path: Path) -> None:
    splits = {"train": {"documents": 1, "bytes": 4, "tokens": 2, "shards": 1}}
    lines = summary(prepared(tmp_path, splits=splits))
    assert "validation: none; no document was held out" in lines
    assert "data.corpus.validation" not in lines[-1]


@pytest.mark.parametrize(
    ("documents", "tokens", "said"),
    [
        (1, 13, "validation is SMALL: 1 document, 13 tokens;"),
        (1, 10**6, "validation is SMALL: 1 document, 1M tokens;"),
        (3, 9_999, "validation is SMALL: 3 documents, 10K tokens;"),
        (2, 10_000, ""),
    ],
)
def test_too_little_held_out_is_said(tmp_path: Path, documents: int, tokens: int, said: str) -> None:
    train = {"documents": 1200, "bytes": 4096, "tokens": 1024, "shards": 2}
    lines = summary(
        prepared(tmp_path, splits={"train": train, "validation": {**train, "documents": documents, "tokens": tokens}})
    )
    found = [line for line in lines if "SMALL" in line]
    assert len(found) == bool(said)
    assert all(line.startswith(said) and "validation_fraction=0.1" in line for line in found)


@pytest.mark.parametrize("name", ["output", "tokenizer"])
def test_null_is_no_place(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=null must be "):
        composed("input=a", *(["output=out"] if name != "output" else []), f"{name}=null")
