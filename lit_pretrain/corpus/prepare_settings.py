"""What a preparation is asked to do, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_pretrain.corpus.records import check_separator
from lit_pretrain.corpus.sources import DOCUMENTS, FORMATS, Reading
from lit_pretrain.corpus.tokenizer import EOS_TOKEN
from lit_pretrain.errors import ConfigError

TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What a preparation is asked to do.

    Args:
        input: Files, folders, globs on any file system of fsspec, and ``hf://NAME``.
        output: Folder for the shards.
        format: ``text``, ``jsonl`` or ``parquet`` for every file; None goes by the names.
        reading: How documents lie in the input.
        tokenizer: ``train``, or what ``load_tokenizer`` takes.
        tokenizer_pattern: For ``.tiktoken`` files of unknown name.
        eos_token: The token that ends a document; None takes the tokenizer's own.
        vocab_size: Of a tokenizer that is trained.
        sample_bytes: Text that it is trained on, taken evenly from the whole input.
        validation_fraction: Share of documents held out, from 0 to below 1.
        errors: ``skip`` counts documents that cannot be used, ``strict`` stops at the first.
        workers: Processes; None is one per core, 0 works in this one. The shards do not depend on it.
        unit_bytes: Input per shard and unit of work; None follows from the size of the input.

    Raises:
        ConfigError: When a setting is impossible.
    """

    input: Sequence[str]
    output: Path
    format: str | None = None
    reading: Reading = field(default_factory=Reading)
    tokenizer: str = TRAIN
    tokenizer_pattern: str | None = None
    eos_token: str | None = None
    vocab_size: int = 32768
    sample_bytes: int = 2**26
    validation_fraction: float = 0.01
    errors: str = "skip"
    workers: int | None = None
    unit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, (None, *FORMATS)),
            ("documents", self.reading.documents, DOCUMENTS),
            ("errors", self.errors, ("skip", "strict")),
        ):
            if value not in known:
                words = ", ".join(word for word in known if word)
                raise ConfigError(f"{name}={value} is unknown; use {words}{', or null' if None in known else ''}.")
        for name, number, least in (
            ("vocab_size", self.vocab_size, 257),
            ("sample_bytes", self.sample_bytes, 1),
            ("max_document_bytes", self.reading.max_document_bytes, 1),
            ("workers", 0 if self.workers is None else self.workers, 0),
            ("unit_bytes", 1 if self.unit_bytes is None else self.unit_bytes, 1),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ConfigError(f"{name}={number!r} must be a whole number of at least {least}.")
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise ConfigError(f"validation_fraction={fraction!r} must be at least 0 and below 1.")
        by_separator, separator = self.reading.documents == "separator", self.reading.separator
        if by_separator != (separator is not None):
            raise ConfigError(
                "documents=separator needs the text that stands between documents: separator=...."
                if by_separator
                else f"separator={separator!r} is used only with documents=separator; set both or neither."
            )
        if separator is not None:
            check_separator(separator.encode())
        if self.tokenizer == TRAIN and self.tokenizer_pattern is not None:
            raise ConfigError("tokenizer_pattern is for .tiktoken files; a tokenizer that is trained has its own.")
        if self.tokenizer == TRAIN and self.eos_token not in (None, EOS_TOKEN):
            raise ConfigError(f"eos_token={self.eos_token} is not what tokenizer=train makes; leave it at null.")
