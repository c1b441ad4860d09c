"""How the cores are used when there are fewer units than workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_pretrain.corpus import _workers, train_tokenizer
from lit_pretrain.corpus.encode import Encoding, unit_folder
from lit_pretrain.corpus.sources import Piece, Reading


@pytest.mark.parametrize(
    ("workers", "unfinished", "threads"), [(2, 60, 1), (2, 2, 1), (2, 1, 2), (8, 5, 1), (8, 4, 2), (8, 1, 8), (8, 0, 8)]
)
def test_idle_cores_are_shared_out(workers: int, unfinished: int, threads: int) -> None:
    assert _workers.threads_each(workers, unfinished) == threads


def test_threads_begin_between_two_batches_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads its variable at every call, so a unit in work goes on with threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    threads, seen = SimpleNamespace(value=1), []

    def batches(*_: object, **__: object) -> Iterator[int]:
        for value in (1, 4, 8):
            seen.append((os.environ["TOKENIZERS_PARALLELISM"], os.environ.get("RAYON_NUM_THREADS")))
            threads.value = value
            yield 1

    state = {"encoding": None, "tokenizer": None, "stop": SimpleNamespace(is_set=lambda: False), "threads": threads}
    monkeypatch.setattr(_workers, "_state", lambda: state)
    monkeypatch.setattr(_workers, "encode_unit", batches)
    assert _workers._encode([], 3) == 3
    os.environ.pop("RAYON_NUM_THREADS", None)
    # No more threads than at the first batch that was shared out: the library makes them once.
    assert seen == [("false", None), ("false", None), ("true", "4")]


def encode(folder: Path, pieces: list[Piece], tokenizer: Path, *, workers: int) -> dict[str, bytes]:
    folder.mkdir()
    encoding = Encoding(
        folder=folder,
        tokenizer=tokenizer,
        eos_token="<|endoftext|>",
        reading=Reading(),
        validation_fraction=0.1,
        strict=True,
        config_hash="",
    )
    assert list(_workers.encode_units({7: pieces}, encoding=encoding, workers=workers)) == [7]
    files = (path for path in unit_folder(folder, 7).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_single_unit_gives_the_same_bytes_with_threads(tmp_path: Path) -> None:
    texts = [f"document {number} says {number * 7919 % 1000} " * 40 for number in range(3000)]
    tokenizer = train_tokenizer(texts[:50], tmp_path / "tokenizer.json", vocab_size=280).path
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert path.stat().st_size > 2 * 2**20, "several batches"
    pieces: list[Any] = [Piece(path=str(path), kind="jsonl", size=path.stat().st_size)]
    assert encode(tmp_path / "threads", pieces, tokenizer, workers=3) == encode(
        tmp_path / "here", pieces, tokenizer, workers=0
    )
