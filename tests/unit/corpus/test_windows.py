"""Rows against loops over a short stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lit_pretrain.corpus import ShardWriter, TokenStream, Windows, open_tokens, read_rows
from lit_pretrain.errors import ConfigError, DataError

DOCUMENTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35, 36, 37], [41, 42], [], [51, 52, 53, 54]]
STREAM = [11, 12, 13, 9, 21, 9, 31, 32, 33, 34, 35, 36, 37, 9, 41, 42, 9, 9, 51, 52, 53, 54, 9]
DOCUMENT_OF = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 5, 5, 5, 5, 5]


@pytest.fixture(params=[2**30, 5])
def stream(tmp_path: Path, request: pytest.FixtureRequest) -> TokenStream:
    with ShardWriter(tmp_path, vocab_size=60, eos_id=9, max_shard_tokens=request.param) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return open_tokens(tmp_path)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 11, 21, 22])
def test_training_rows(stream: TokenStream, length: int) -> None:
    windows = Windows(stream, sequence_length=length)
    number = (len(STREAM) - 1) // length
    assert len(windows) == number
    batch = read_rows([windows], source=np.zeros(number, int), window=np.arange(number))
    assert set(batch) == {"ids", "targets"}
    for row in range(number):
        assert batch["ids"][row].tolist() == STREAM[row * length : (row + 1) * length]
        assert batch["targets"][row].tolist() == STREAM[row * length + 1 : (row + 1) * length + 1]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 11, 21, 22, 23, 50])
def test_validation_predicts_every_token_but_the_first_once(stream: TokenStream, length: int) -> None:
    windows = Windows(stream, sequence_length=length, keep_partial=True)
    batch = read_rows([windows], source=np.zeros(len(windows), int), window=np.arange(len(windows)), padding=9)
    predicted = batch["targets"] != -100
    assert batch["targets"][predicted].tolist() == STREAM[1:]
    assert batch["ids"][predicted].tolist() == STREAM[:-1]
    assert (batch["ids"][~predicted] == 9).all()
    assert (~predicted).sum() < length


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 11, 22])
@pytest.mark.parametrize("keep_partial", [False, True])
def test_isolated_documents(stream: TokenStream, length: int, keep_partial: bool) -> None:
    windows = Windows(stream, sequence_length=length, keep_partial=keep_partial)
    number = len(windows)
    batch = read_rows([windows], source=np.zeros(number, int), window=np.arange(number), isolate_documents=True)
    for row in range(number):
        first = DOCUMENT_OF[row * length]
        begun = row * length
        for place in range(length):
            here = row * length + place
            if here + 1 >= len(STREAM):
                assert batch["targets"][row, place] == -100
                continue
            if here > 0 and DOCUMENT_OF[here] != DOCUMENT_OF[here - 1]:
                begun = here
            assert batch["ids"][row, place] == STREAM[here]
            assert batch["doc_ids"][row, place] == DOCUMENT_OF[here] - first
            assert batch["positions"][row, place] == here - max(begun, row * length)
            crosses = DOCUMENT_OF[here] != DOCUMENT_OF[here + 1]
            assert batch["targets"][row, place] == (-100 if crosses else STREAM[here + 1])


def test_rows_of_padding(stream: TokenStream) -> None:
    windows = Windows(stream, sequence_length=4)
    batch = read_rows(
        [windows], source=np.asarray([-1, 0]), window=np.asarray([0, 1]), isolate_documents=True, padding=9
    )
    assert batch["ids"].tolist() == [[9] * 4, STREAM[4:8]]
    assert batch["targets"][0].tolist() == [-100] * 4
    assert batch["positions"][0].tolist() == [0, 1, 2, 3]
    assert all(array.dtype == np.int64 for array in batch.values())


def test_errors(stream: TokenStream, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 23 tokens, a window needs 24"):
        Windows(stream, sequence_length=23)
    for length in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="sequence_length="):
            Windows(stream, sequence_length=length)  # type: ignore[arg-type]
    with ShardWriter(tmp_path / "one", vocab_size=60, eos_id=9) as writer:
        writer.add([])
    with pytest.raises(DataError, match="has 1 tokens, a window needs 2"):
        Windows(open_tokens(tmp_path / "one"), sequence_length=4, keep_partial=True)
