"""Reads token ids from disk as one long stream, without loading them."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_pretrain.corpus._files import readable_errors, sha256_of
from lit_pretrain.corpus.index import read_index
from lit_pretrain.corpus.manifest import MANIFEST, Manifest
from lit_pretrain.errors import DataError

_SCAN = 2**24  # ids looked at in one piece when a whole file is scanned


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """What is known of a stream before its ids are read.

    Args:
        vocab_size: Ids run from 0 to ``vocab_size - 1``; None when the files do not say.
        eos_id: The id that ends each document; None when unknown.
        tokenizer_hash: Which tokenizer made the ids; empty when unknown.
        config_hash: Which settings made the files; empty when unknown.
        max_id: Largest id; None when the files do not say.
        num_bytes: UTF-8 bytes of the text; None when the files do not say.
    """

    vocab_size: int | None = None
    eos_id: int | None = None
    tokenizer_hash: str = ""
    config_hash: str = ""
    max_id: int | None = None
    num_bytes: int | None = None


class TokenStream:
    """Token ids of one source, over all its files, memory-mapped.

    Args:
        path: Where the ids came from, for messages.
        shards: Ids per file, each (n,), unsigned.
        document_starts: First token of each document per file, in tokens of that file; None when the files do not say.
        info: What is known of the ids.
    """

    def __init__(
        self,
        path: Path,
        *,
        shards: list[NDArray[np.generic]],
        document_starts: list[NDArray[np.int64]] | None,
        info: StreamInfo,
    ) -> None:
        self.path = path
        self.info = info
        self._shards = shards
        self._starts_per_shard = document_starts
        self._ends = list(itertools.accumulate(shard.size for shard in shards))
        self.num_tokens = self._ends[-1]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the ids on disk."""
        return self._shards[0].dtype

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """First token of each document in the stream, (D,), int64; in memory.

        Raises:
            DataError: When neither an index nor an end-of-document id tells.
        """
        if self._starts_per_shard is not None:
            offsets = [0, *self._ends[:-1]]
            return np.concatenate([s + o for s, o in zip(self._starts_per_shard, offsets, strict=True)])
        if self.info.eos_id is None:
            raise DataError(f"{self.path} does not say where documents begin; give an index or the end-of-document id.")
        found, base = [np.zeros(1, np.int64)], 0
        for shard in self._shards:
            found.extend(
                np.flatnonzero(shard[low : low + _SCAN] == self.info.eos_id) + (base + low + 1)
                for low in range(0, shard.size, _SCAN)
            )
            base += shard.size
        starts = np.concatenate(found)
        return starts[starts < self.num_tokens]

    def locate(self, offset: int) -> tuple[str, int]:
        """The file that holds a token of the stream, and the token's place in it, from 0.

        Args:
            offset: Below ``num_tokens``.
        """
        shard = bisect.bisect_right(self._ends, offset)
        memory = self._shards[shard].base
        file = getattr(memory, "filename", None) or self.path
        return str(file), offset - (self._ends[shard] - self._shards[shard].size)

    def piece(self, offset: int, length: int) -> NDArray[np.generic]:
        """The ids from ``offset`` on, (length,), as they lie on disk; fewer at the end of the stream."""
        length = max(0, min(length, self.num_tokens - offset))
        if len(self._shards) == 1:
            return self._shards[0][offset : offset + length]
        pieces = []
        shard = bisect.bisect_right(self._ends, offset)
        while length > 0:
            ids = self._shards[shard]
            local = offset - (self._ends[shard] - ids.size)
            pieces.append(ids[local : local + length])
            offset, length, shard = offset + pieces[-1].size, length - pieces[-1].size, shard + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else self._shards[0][:0]

    def scan_max_id(self) -> int:
        """The largest id, found by reading everything (about 1 GB a second from memory)."""
        return max(int(shard[low : low + _SCAN].max()) for shard in self._shards for low in range(0, shard.size, _SCAN))


def open_tokens(
    path: Path | str, *, dtype: str = "uint16", vocab_size: int | None = None, eos_id: int | None = None
) -> TokenStream:
    """Open a shard folder, a Megatron pair (``x`` or ``x.bin`` beside ``x.idx``) or a bare ``.bin`` of ids.

    Args:
        path: Folder, ``.bin``, ``.idx`` or the two files' common prefix.
        dtype: Type of the ids in a bare ``.bin``, which cannot say it: ``uint8``, ``uint16`` or ``uint32``.
        vocab_size: For files that do not say; checked against those that do.
        eos_id: For files that do not say.

    Raises:
        DataError: When the files are missing, unreadable, empty, truncated, of the wrong type or with ids beyond the
            vocabulary.
    """
    path = Path(path)
    with readable_errors(path, doing="read"):
        if path.is_dir():
            stream = _open_folder(path)
        elif path.with_suffix(".idx").exists() and path.suffix in (".bin", ".idx"):
            stream = _open_pair(path.with_suffix(""), vocab_size=vocab_size, eos_id=eos_id)
        elif Path(f"{path}.idx").exists():
            stream = _open_pair(path, vocab_size=vocab_size, eos_id=eos_id)
        elif path.exists():
            stream = _open_bare(path, dtype=dtype, vocab_size=vocab_size, eos_id=eos_id)
        else:
            raise FileNotFoundError(path)
    known = stream.info.vocab_size
    if vocab_size is not None and known != vocab_size:
        raise DataError(
            f"{path} was written for vocab_size={known}, not {vocab_size}; use the tokenizer it was made with."
        )
    return stream


def verify_folder(folder: Path | str) -> Manifest:
    """Compare every file of a shard folder with the checksums in its manifest, reading all of it.

    Raises:
        DataError: Naming the first file that differs.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    for shard in manifest.shards:
        for ending, expected in ((".bin", shard.bin_sha256), (".idx", shard.idx_sha256)):
            file = folder / f"{shard.name}{ending}"
            if sha256_of(file) != expected:
                raise DataError(f"{file} does not match the checksum in {MANIFEST}; write the folder again.")
    return manifest


def _map_ids(path: Path, dtype: str) -> NDArray[np.generic]:
    """Ids of one file, memory-mapped, as a plain array: slicing a memmap object is many times slower."""
    itemsize = np.dtype(dtype).itemsize
    with readable_errors(path, doing="read"):
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            raise DataError(f"{path} is empty; write it again.")
        if num_bytes % itemsize:
            raise DataError(
                f"{path} has {num_bytes} bytes, which is not a whole number of {dtype} ids: it is truncated or has "
                "another dtype."
            )
        return np.asarray(np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r"))


def _open_folder(folder: Path) -> TokenStream:
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"{folder} has no {MANIFEST}: it is not a shard folder, or writing it was interrupted; write it again."
        )
    manifest = Manifest.load(folder)
    if not manifest.num_tokens:
        raise DataError(f"{folder} holds no tokens; give it documents or leave the source out.")
    if manifest.max_id >= manifest.vocab_size:
        raise DataError(f"{folder} holds the id {manifest.max_id}, beyond vocab_size={manifest.vocab_size}.")
    shards, starts = [], []
    for shard in manifest.shards:
        ids = _map_ids(folder / f"{shard.name}.bin", manifest.dtype)
        if ids.size != shard.num_tokens:
            raise DataError(
                f"{folder / shard.name}.bin has {ids.size} tokens, {MANIFEST} says {shard.num_tokens}: it is truncated "
                "or was changed; write the folder again."
            )
        shards.append(ids)
        starts.append(_starts(folder / f"{shard.name}.idx", num_tokens=ids.size, num_documents=shard.num_documents))
    return TokenStream(
        folder,
        shards=shards,
        document_starts=starts,
        info=StreamInfo(
            vocab_size=manifest.vocab_size,
            eos_id=manifest.eos_id,
            tokenizer_hash=manifest.tokenizer_hash,
            config_hash=manifest.config_hash,
            max_id=manifest.max_id,
            num_bytes=manifest.num_bytes,
        ),
    )


def _starts(path: Path, *, num_tokens: int, num_documents: int) -> NDArray[np.int64]:
    index = read_index(path)
    if index.num_tokens != num_tokens or index.starts.size != num_documents:
        raise DataError(
            f"{path} counts {index.num_tokens} tokens in {index.starts.size} documents, the ids are {num_tokens} in "
            f"{num_documents}; write the folder again."
        )
    return index.starts


def _open_pair(prefix: Path, *, vocab_size: int | None, eos_id: int | None) -> TokenStream:
    index = read_index(Path(f"{prefix}.idx"))
    ids = _map_ids(Path(f"{prefix}.bin"), str(index.dtype))
    if ids.size != index.num_tokens:
        raise DataError(
            f"{prefix}.bin has {ids.size} tokens, its index says {index.num_tokens}: it is truncated or belongs to "
            "another index."
        )
    info = StreamInfo(vocab_size=vocab_size, eos_id=eos_id)
    return TokenStream(prefix, shards=[ids], document_starts=[index.starts], info=info)


def _open_bare(path: Path, *, dtype: str, vocab_size: int | None, eos_id: int | None) -> TokenStream:
    if dtype not in ("uint8", "uint16", "uint32"):
        raise DataError(f"dtype={dtype!r} is no type for token ids; use uint8, uint16 or uint32.")
    ids = _map_ids(path, dtype)
    info = StreamInfo(vocab_size=vocab_size, eos_id=eos_id)
    return TokenStream(path, shards=[ids], document_starts=None, info=info)
