"""Writes documents of token ids as a shard folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_pretrain.corpus._files import WholeFile, readable_errors
from lit_pretrain.corpus.index import write_index
from lit_pretrain.corpus.manifest import MANIFEST, Manifest, ShardInfo, token_dtype
from lit_pretrain.errors import ConfigError, DataError


class ShardWriter:
    """Collects documents into ``shard-00000.bin``, ``.idx``, ..., and last ``manifest.json``.

    A folder without a manifest is unfinished and is refused by the reader. Use it as a context manager: an exception
    leaves no manifest behind.

    Args:
        folder: Made if missing; must not hold a manifest yet.
        vocab_size: Ids run from 0 to ``vocab_size - 1``; decides the type of the ids.
        eos_id: Appended to every document; None appends nothing.
        tokenizer_hash: Which tokenizer made the ids.
        config_hash: Which settings and input made the folder.
        max_shard_tokens: A new shard begins before a document that would exceed this.

    Raises:
        ConfigError: When a size is impossible.
        DataError: When the folder cannot be written or already holds shards.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        vocab_size: int,
        eos_id: int | None,
        tokenizer_hash: str = "",
        config_hash: str = "",
        max_shard_tokens: int = 2**30,
    ) -> None:
        self.folder = Path(folder)
        self._dtype = token_dtype(vocab_size)
        if eos_id is not None and not 0 <= eos_id < vocab_size:
            raise ConfigError(f"eos_id={eos_id} must be at least 0 and below vocab_size={vocab_size}.")
        if max_shard_tokens < 1:
            raise ConfigError(f"max_shard_tokens={max_shard_tokens} must be at least 1.")
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._on_disk = np.dtype(self._dtype).newbyteorder("<")
        self._itemsize = self._on_disk.itemsize
        self._ending = b"" if eos_id is None else np.asarray(eos_id, self._on_disk).tobytes()
        self._hashes = (tokenizer_hash, config_hash)
        self._max_shard_tokens = max_shard_tokens
        with readable_errors(self.folder, doing="write"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / MANIFEST).exists():
                raise DataError(f"{self.folder} already holds shards; choose another folder or delete it first.")
        self._shards: list[ShardInfo] = []
        self._file: WholeFile | None = None
        self._lengths: list[int] = []
        self._num_tokens = self._num_bytes = 0
        self._max_id = -1
        self._manifest: Manifest | None = None

    def add(self, ids: Sequence[int] | ArrayLike, *, num_bytes: int = 0) -> None:
        """Append one document.

        Args:
            ids: Token ids, (n,), without the end-of-document id.
            num_bytes: UTF-8 bytes of the document's text.

        Raises:
            DataError: When an id does not fit the vocabulary or nothing can be written.
        """
        document: NDArray[np.int64] = np.asarray(ids, np.int64).reshape(-1)
        largest = -1
        if document.size:
            smallest, largest = int(document.min()), int(document.max())
            if smallest < 0 or largest >= self._vocab_size:
                outside = smallest if smallest < 0 else largest
                raise DataError(
                    f"Token id {outside} does not fit vocab_size={self._vocab_size}; use the right tokenizer."
                )
        length = document.size + len(self._ending) // self._itemsize
        if not length:
            return
        if self._file is not None and self._num_tokens + length > self._max_shard_tokens:
            self._finish_shard()
        if self._file is None:
            self._file = WholeFile(self.folder / f"{self._name}.bin")
        self._file.write(document.astype(self._on_disk).tobytes() + self._ending)
        self._lengths.append(length)
        self._num_tokens += length
        self._num_bytes += num_bytes
        self._max_id = max(self._max_id, largest, -1 if self._eos_id is None else self._eos_id)

    def close(self) -> Manifest:
        """Finish the last shard and write the manifest; a second call changes nothing."""
        if self._manifest is not None:
            return self._manifest
        self._finish_shard()
        tokenizer_hash, config_hash = self._hashes
        manifest = Manifest(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            eos_id=self._eos_id,
            tokenizer_hash=tokenizer_hash,
            config_hash=config_hash,
            shards=tuple(self._shards),
        )
        manifest.save(self.folder)
        self._manifest = manifest
        return manifest

    def discard(self) -> None:
        """Give up: no manifest is written."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    @property
    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}"

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        name, lengths = self._name, np.asarray(self._lengths, np.int64)
        bin_sha256 = self._file.commit()
        self._file = None
        idx_sha256 = write_index(self.folder / f"{name}.idx", lengths, dtype=self._dtype)
        self._shards.append(
            ShardInfo(
                name=name,
                num_tokens=self._num_tokens,
                num_documents=lengths.size,
                num_bytes=self._num_bytes,
                max_id=self._max_id,
                bin_sha256=bin_sha256,
                idx_sha256=idx_sha256,
            )
        )
        self._lengths, self._num_tokens, self._num_bytes, self._max_id = [], 0, 0, -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
