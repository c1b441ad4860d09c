"""Rows of training text: windows of ``T`` inputs and their targets, cut from a stream of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus.reader import TokenStream
from lit_pretrain.errors import ConfigError, DataError

IGNORED = -100  # target of a place where nothing is to be predicted; torch's default ignore_index


class Windows:
    """A stream cut into rows that overlap by the one token which is a target here and an input there.

    Args:
        stream: Tokens.
        sequence_length: Inputs per row, in tokens.
        keep_partial: Keep the last row though it is not full: its missing targets are ignored (for validation).
            Otherwise fewer than ``sequence_length`` tokens at the end of the stream are never read.

    Raises:
        ConfigError: When ``sequence_length`` is impossible.
        DataError: When the stream is shorter than one row.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, keep_partial: bool = False) -> None:
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
            raise ConfigError(f"sequence_length={sequence_length!r} must be a whole number of at least 1.")
        self.stream = stream
        self.sequence_length = sequence_length
        targets = stream.num_tokens - 1
        self._count = -(-targets // sequence_length) if keep_partial else targets // sequence_length
        if self._count < 1:
            need = 2 if keep_partial else sequence_length + 1
            raise DataError(
                f"{stream.path} has {stream.num_tokens} tokens, a window needs {need}; give it more text, leave the "
                "source out, or set a shorter sequence_length."
            )

    def __len__(self) -> int:
        return self._count

    def fill(self, window: int, ids: NDArray[np.int64], targets: NDArray[np.int64], *, padding: int = 0) -> None:
        """Write one row.

        Args:
            window: Below ``len(self)``.
            ids: Input ids, (T,), written.
            targets: Ids to predict, (T,), written.
            padding: Id in inputs beyond the end of the stream.
        """
        length = self.sequence_length
        piece = self.stream.piece(window * length, length + 1)
        if piece.size == length + 1:
            ids[:] = piece[:-1]
            targets[:] = piece[1:]
            return
        ids[: piece.size - 1], ids[piece.size - 1 :] = piece[:-1], padding
        targets[: piece.size - 1], targets[piece.size - 1 :] = piece[1:], IGNORED

    def isolate(
        self, window: int, targets: NDArray[np.int64], positions: NDArray[np.int64], doc_ids: NDArray[np.int64]
    ) -> None:
        """Keep the documents of a row apart.

        Args:
            window: Below ``len(self)``.
            targets: (T,); a target in another document than its input becomes ignored.
            positions: (T,), written: places within the document, from 0; a document that began before the row starts
                at 0 too.
            doc_ids: (T,), written: number of the document within the row, from 0.
        """
        length = self.sequence_length
        offset = window * length
        starts = self.stream.document_starts
        low, high = np.searchsorted(starts, [offset + 1, offset + length + 1])
        begins = starts[low:high] - offset  # in 1 ... T: places where another document begins
        targets[begins - 1] = IGNORED
        inside = begins[begins < length]
        doc_ids[:] = 0
        doc_ids[inside] = 1
        np.cumsum(doc_ids, out=doc_ids)
        positions[:] = np.arange(length) - np.concatenate([[0], inside])[doc_ids]


def read_rows(
    sources: Sequence[Windows],
    *,
    source: NDArray[np.int64],
    window: NDArray[np.int64],
    isolate_documents: bool = False,
    padding: int = 0,
) -> Mapping[str, NDArray[np.int64]]:
    """A batch of rows.

    Args:
        sources: One per source index; all of one sequence length.
        source: Source of each row, (B,); -1 makes a row of padding without any target.
        window: Window of each row, (B,).
        isolate_documents: Add ``positions`` and ``doc_ids``.
        padding: Id in inputs that stand for nothing.

    Returns:
        ``ids``, ``targets`` and, with ``isolate_documents``, ``positions`` and ``doc_ids``, each (B, T) int64.
    """
    shape = (source.size, sources[0].sequence_length)
    names = ("ids", "targets", *(("positions", "doc_ids") if isolate_documents else ()))
    batch = {name: np.empty(shape, np.int64) for name in names}
    ids, targets = batch["ids"], batch["targets"]
    for row, (of, number) in enumerate(zip(source.tolist(), window.tolist(), strict=True)):
        if of < 0:
            ids[row], targets[row] = padding, IGNORED
            if isolate_documents:
                batch["positions"][row], batch["doc_ids"][row] = np.arange(shape[1]), 0
            continue
        sources[of].fill(number, ids[row], targets[row], padding=padding)
        if isolate_documents:
            sources[of].isolate(number, targets[row], batch["positions"][row], batch["doc_ids"][row])
    return batch
