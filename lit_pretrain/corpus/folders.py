"""A corpus of shards that already exist."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lit_pretrain.corpus.reader import TokenStream, open_tokens
from lit_pretrain.corpus.tokenizer import EOS_TOKEN, TokenizerFile
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.specs import PreparedCorpus


class ShardFolders:
    """Shard folders, Megatron pairs or bare ``.bin`` files of the user's own.

    Args:
        sources: Name to folder or file.
        validation: Name to folder or file of held-out documents; names must be among the sources'.
        tokenizer: A ``tokenizer.json``; None when only ids are needed.
        vocab_size: For files that do not say, without a tokenizer.
        eos_id: The id that ends a document, likewise.
        eos_token: The tokenizer's token that ends a document.
        dtype: Type of the ids in bare ``.bin`` files: ``uint8``, ``uint16`` or ``uint32``.

    Raises:
        ConfigError: When the settings contradict each other.
    """

    def __init__(
        self,
        *,
        sources: Mapping[str, Path | str],
        validation: Mapping[str, Path | str] | None = None,
        tokenizer: Path | str | None = None,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        eos_token: str = EOS_TOKEN,
        dtype: str = "uint16",
    ) -> None:
        self.sources = _paths("sources", sources)
        self.validation = {} if validation is None else _paths("validation", validation)
        if not self.sources:
            raise ConfigError("data.corpus.sources is empty; give it at least one name: folder.")
        for name in self.validation:
            if name not in self.sources:
                raise ConfigError(
                    f"data.corpus.validation names {name!r}, which is not among data.corpus.sources "
                    f"({', '.join(self.sources)}); use the same names."
                )
        if tokenizer is not None and (vocab_size is not None or eos_id is not None):
            raise ConfigError("data.corpus.tokenizer already says vocab_size and eos_id; set one or the other.")
        if dtype not in ("uint8", "uint16", "uint32"):
            raise ConfigError(f"data.corpus.dtype={dtype!r} is no type for token ids; use uint8, uint16 or uint32.")
        if not isinstance(eos_token, str) or not eos_token:
            raise ConfigError(f"data.corpus.eos_token={eos_token!r} must be the text of a token of the tokenizer.")
        self.tokenizer = None if tokenizer is None else _path("tokenizer", tokenizer)
        self.vocab_size, self.eos_id, self.eos_token, self.dtype = vocab_size, eos_id, eos_token, dtype

    def locate(self) -> PreparedCorpus:
        """Where everything is; sizes and headers are checked.

        Raises:
            DataError: When a file is missing, damaged or made with another tokenizer.
        """
        self._open()
        return PreparedCorpus(
            train=self.sources,
            validation=self.validation,
            tokenizer=self.tokenizer,
            eos_token=self.eos_token,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            dtype=self.dtype,
        )

    def prepare(self) -> PreparedCorpus:
        """As ``locate``, and reads files whose largest id nothing records, to compare it with the vocabulary."""
        for stream in self._open():
            limit = stream.info.vocab_size
            if stream.info.max_id is None and limit is not None and (largest := stream.scan_max_id()) >= limit:
                raise DataError(
                    f"{stream.path} holds the id {largest}, beyond vocab_size={limit}; it was made with another "
                    "tokenizer or has another dtype."
                )
        return self.locate()

    def _open(self) -> list[TokenStream]:
        vocab_size, eos_id, tokenizer_hash = self.vocab_size, self.eos_id, ""
        if self.tokenizer is not None:
            with _named("data.corpus.tokenizer"):
                tokenizer = TokenizerFile(self.tokenizer, eos_token=self.eos_token)
            vocab_size, eos_id, tokenizer_hash = tokenizer.vocab_size, tokenizer.eos_id, tokenizer.content_hash
        streams = []
        for setting, paths in (("sources", self.sources), ("validation", self.validation)):
            for name, path in paths.items():
                with _named(f"data.corpus.{setting}.{name}"):
                    streams.append(open_tokens(path, dtype=self.dtype, vocab_size=vocab_size, eos_id=eos_id))
        check_alike(streams, tokenizer_hash=tokenizer_hash)
        if self.tokenizer is not None:
            _check_eos(streams[0], tokenizer)
        return streams


def _paths(setting: str, given: Mapping[str, Path | str]) -> dict[str, Path]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"data.corpus.{setting}={given!r} must map names to folders: {{NAME: FOLDER}}.")
    return {str(name): _path(f"{setting}.{name}", path) for name, path in given.items()}


def _path(setting: str, given: Path | str) -> Path:
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise ConfigError(f"data.corpus.{setting}={given!r} must be the path of a file or folder.")
    return Path(given).expanduser()


def _check_eos(stream: TokenStream, tokenizer: TokenizerFile) -> None:
    """Raises DataError where shards end their documents with another token than the one named."""
    if stream.info.eos_id in (None, tokenizer.eos_id):
        return
    there = tokenizer.token_of(stream.info.eos_id)
    raise DataError(
        f"data.corpus.eos_token={tokenizer.eos_token} is the id {tokenizer.eos_id}, but documents in {stream.path} end "
        f"with the id {stream.info.eos_id}; set data.corpus.eos_token={there}."
    )


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Say which setting led to a file that is missing or damaged."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{setting}: {error}") from error


def check_alike(streams: list[TokenStream], *, tokenizer_hash: str = "") -> None:
    """Raises DataError unless all streams have one vocabulary, one end-of-document id and one tokenizer."""
    first = streams[0]
    for stream in streams:
        for what in ("vocab_size", "eos_id", "tokenizer_hash"):
            here, there = getattr(stream.info, what), getattr(first.info, what)
            if what == "tokenizer_hash":
                there = tokenizer_hash or there
                if not here or not there:  # unknown
                    continue
                if here != there and tokenizer_hash:
                    raise DataError(f"{stream.path} was made with another tokenizer than the one given; use its own.")
            if here != there:
                raise DataError(
                    f"{stream.path} has {what}={here}, {first.path} has {what}={there}; write all sources with one "
                    "tokenizer."
                )
