"""Where the rows of a batch come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_pretrain.corpus import TokenizerFile, Windows
from lit_pretrain.errors import DataError

_MOST_CHARACTERS = 240  # of a row's text


def row_origin(source: str, windows: Windows, window: int, *, tokenizer: TokenizerFile | None) -> dict[str, Any]:
    """One row, as plain containers.

    Args:
        source: Its name.
        windows: Of the source.
        window: Which.
        tokenizer: For the text; None leaves it out.

    Returns:
        ``source``, ``file``, ``offset`` (token in that file), ``documents`` (first and last in the source, from 0; None
        where the files do not say) and ``text`` (its beginning).
    """
    stream, length = windows.stream, windows.sequence_length
    offset = window * length
    file, within = stream.locate(offset)
    out: dict[str, Any] = {"source": source, "file": file, "offset": within, "documents": None}
    try:
        starts = stream.document_starts
    except DataError:
        starts = None
    if starts is not None:
        first, last = np.searchsorted(starts, [offset, offset + length - 1], side="right") - 1
        out["documents"] = [int(first), int(last)]
    if tokenizer is not None:
        text = tokenizer.decode(stream.piece(offset, min(length, _MOST_CHARACTERS)).tolist())
        out["text"] = text[:_MOST_CHARACTERS]
    return out
