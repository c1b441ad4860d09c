"""What a shard folder says about itself: ``manifest.json``, written last."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_pretrain.corpus._files import readable_errors, write_whole
from lit_pretrain.errors import ConfigError, DataError

MANIFEST = "manifest.json"
FORMAT = "lit-pretrain-shards"
VERSION = 1


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every id below ``vocab_size``.

    Raises:
        ConfigError: When the vocabulary is empty or larger than 2^31.
    """
    if not 1 <= vocab_size <= 2**31:
        raise ConfigError(f"vocab_size={vocab_size} must lie between 1 and 2^31.")
    for name in ("uint8", "uint16"):
        if vocab_size - 1 <= np.iinfo(name).max:
            return name
    return "uint32"


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One pair of ``.bin`` and ``.idx`` files.

    Args:
        name: File name without its ending.
        num_tokens: Token ids, end-of-document ids included.
        num_documents: Documents.
        num_bytes: UTF-8 bytes of the text.
        max_id: Largest id.
        bin_sha256: Checksum of the ids.
        idx_sha256: Checksum of the index.
    """

    name: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    max_id: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A shard folder's contents.

    Args:
        dtype: Type of the ids, little-endian.
        vocab_size: Ids run from 0 to ``vocab_size - 1``.
        eos_id: The id that ends each document; None when documents end without one.
        tokenizer_hash: Which tokenizer made the ids; empty when unknown.
        config_hash: Which settings and input made the folder; empty when unknown.
        shards: The files, in reading order.
    """

    dtype: str
    vocab_size: int
    eos_id: int | None
    tokenizer_hash: str
    config_hash: str
    shards: tuple[ShardInfo, ...]

    @property
    def num_tokens(self) -> int:
        """Token ids over all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents over all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text over all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def max_id(self) -> int:
        """Largest id over all shards."""
        return max((shard.max_id for shard in self.shards), default=-1)

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder`` at once or not at all."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            **dataclasses.asdict(self),
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
        }
        write_whole(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read ``manifest.json``.

        Raises:
            DataError: When it is missing, unreadable, of another format or inconsistent.
        """
        path = folder / MANIFEST
        with readable_errors(path, doing="read"):
            raw = path.read_bytes()
        try:
            content: dict[str, Any] = json.loads(raw)
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise DataError(
                    f"{path} has format {content['format']!r} version {content['version']!r}; "
                    f"only {FORMAT!r} version {VERSION} can be read."
                )
            shards = tuple(ShardInfo(**shard) for shard in content["shards"])
            names = [field.name for field in dataclasses.fields(cls) if field.name != "shards"]
            manifest = cls(**{name: content[name] for name in names}, shards=shards)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}); write the folder again.") from error
        wrong = _first_of_another_type(manifest)
        if wrong is not None:
            raise DataError(f"{path} is damaged ({wrong}); write the folder again.")
        if manifest.eos_id is not None and not 0 <= manifest.eos_id < manifest.vocab_size:
            raise DataError(f"{path} has eos_id={manifest.eos_id}, beyond vocab_size={manifest.vocab_size}.")
        if manifest.num_tokens != content.get("num_tokens"):
            raise DataError(f"{path} is damaged: its shards do not add up to {content.get('num_tokens')} tokens.")
        if manifest.dtype not in ("uint8", "uint16", "uint32"):
            raise DataError(f"{path} has dtype {manifest.dtype!r}; use uint8, uint16 or uint32.")
        return manifest


def _first_of_another_type(manifest: Manifest) -> str | None:
    """The first field that JSON gave as another type than it has, with its value; None where all is well."""
    owners: list[Manifest | ShardInfo] = [manifest, *manifest.shards]
    for owner in owners:
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            kind = str if field.type == "str" else int
            optional = field.type == "int | None" and value is None
            if field.name != "shards" and not optional and type(value) is not kind:
                return f"{field.name} is {value!r}"
    return None
