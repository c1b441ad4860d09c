"""The corpus that needs no download: made on first use from text on the user's own machine, then kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_pretrain.corpus._files import locked, readable_errors, sync_folder, write_whole
from lit_pretrain.corpus._progress import Progress
from lit_pretrain.corpus.domains import Domain, SourceFile, known_domains
from lit_pretrain.corpus.folders import check_alike
from lit_pretrain.corpus.holdout import split_documents
from lit_pretrain.corpus.reader import open_tokens, verify_folder
from lit_pretrain.corpus.tokenizer import TokenizerFile, train_tokenizer
from lit_pretrain.corpus.writer import ShardWriter
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.specs import PreparedCorpus
from lit_pretrain.units import count, size

CACHE_VARIABLE = "LIT_PRETRAIN_CACHE"
_RECIPE = 1  # raise it when the same input would give other bytes
_ENCODE_AT_ONCE = 512  # documents


def cache_folder(given: Path | str | None = None) -> Path:
    """Where prepared corpora are kept: ``given``, else ``$LIT_PRETRAIN_CACHE``, else ``~/.cache/lit-pretrain``."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/lit-pretrain").expanduser()


class DefaultCorpus:
    """Python code and technical English from this machine, with a tokenizer trained on them.

    The first use reads, splits and encodes the text (about 20 seconds on one core); later uses find it in the cache.
    Another Python version, other installed packages or other settings make another folder, so a run that must resume
    on exactly its old data after an upgrade names that folder through ``ShardFolders``.

    Args:
        domains: ``code`` (the standard library) and ``english`` (docstrings of installed packages).
        vocab_size: Tokens of the byte-level BPE, at least 257.
        validation_fraction: Share of documents held out, above 0 and below 1.
        max_bytes: UTF-8 bytes of text taken per domain; None is each domain's own limit.
        cache_dir: Where the result is kept; None is ``$LIT_PRETRAIN_CACHE`` or ``~/.cache/lit-pretrain``.

    Raises:
        ConfigError: When a setting is impossible.
    """

    def __init__(
        self,
        *,
        domains: Sequence[str] = ("code", "english"),
        vocab_size: int = 2048,
        validation_fraction: float = 0.05,
        max_bytes: int | None = None,
        cache_dir: Path | str | None = None,
    ) -> None:
        known = known_domains()
        self.domains = [str(name) for name in domains]
        if not self.domains or len(set(self.domains)) != len(self.domains):
            raise ConfigError(f"data.corpus.domains={self.domains} must name at least one domain, each once.")
        for name in self.domains:
            if name not in known:
                raise ConfigError(f"data.corpus.domains holds {name!r}, which is unknown; use {' or '.join(known)}.")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 257:
            raise ConfigError(f"data.corpus.vocab_size={vocab_size!r} must be a whole number of at least 257.")
        if not 0.0 < validation_fraction < 1.0:
            raise ConfigError(f"data.corpus.validation_fraction={validation_fraction} must be above 0 and below 1.")
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"data.corpus.max_bytes={max_bytes} must be at least 1, or null for no limit of yours.")
        self.vocab_size = vocab_size
        self.validation_fraction = float(validation_fraction)
        self.max_bytes = max_bytes
        self.cache_dir = cache_folder(cache_dir)
        self._domains: dict[str, Domain] = {name: known[name] for name in self.domains}
        self._found: tuple[Path, dict[str, list[SourceFile]]] | None = None

    def locate(self) -> PreparedCorpus:
        """Where everything is; sizes and headers are checked.

        Raises:
            DataError: When ``prepare`` has not run, or the cache is damaged.
        """
        folder, _ = self._find()
        if not folder.is_dir():
            raise DataError(f"The default corpus is not in {self.cache_dir} yet; call prepare() first.")
        try:
            self._check(folder)
        except DataError as error:
            raise DataError(
                f"The default corpus in {folder} cannot be used: {str(error).rstrip('.')}. Call prepare() to make it "
                "anew, or delete that folder."
            ) from error
        return self._contents(folder)

    def prepare(self) -> PreparedCorpus:
        """Make the corpus unless it is there and whole, by its checksums.

        A damaged one is set aside under another name, for nobody knows what it was good for, and made anew. Several
        processes may call this at once: one works, the others wait.
        """
        folder, files = self._find()
        if not folder.is_dir() or self._damage(folder) is not None:
            with readable_errors(self.cache_dir, doing="write"):
                self.cache_dir.mkdir(parents=True, exist_ok=True)
            with locked(self.cache_dir / f".{folder.name}.lock"):
                if folder.is_dir() and (damage := self._damage(folder)) is not None:  # not by another process meanwhile
                    _set_aside(folder, damage)
                if not folder.is_dir():
                    self._build(folder, files)
        return self._contents(folder)

    def _contents(self, folder: Path) -> PreparedCorpus:
        return PreparedCorpus(
            train={name: folder / f"{name}-train" for name in self.domains},
            validation={name: folder / f"{name}-validation" for name in self.domains},
            tokenizer=folder / "tokenizer.json",
        )

    def _check(self, folder: Path) -> None:
        """Raises DataError unless tokenizer and shards can be opened and belong together."""
        found = self._contents(folder)
        assert found.tokenizer is not None
        tokenizer = TokenizerFile(found.tokenizer)
        streams = [open_tokens(path) for path in (*found.train.values(), *found.validation.values())]
        check_alike(streams, tokenizer_hash=tokenizer.content_hash)

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a corpus that was once whole, or None; reads all of it, some 10 MB.

        Raises:
            DataError: It may be whole, but this process may not read it.
        """
        try:
            self._check(folder)
            found = self._contents(folder)
            for path in (*found.train.values(), *found.validation.values()):
                verify_folder(path)
        except DataError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            return str(error)
        return None

    def _find(self) -> tuple[Path, dict[str, list[SourceFile]]]:
        """The cache folder, named after all that decides its bytes, and the files to read."""
        if self._found is None:
            files = {name: domain.list_files() for name, domain in self._domains.items()}
            decisive = {
                "recipe": _RECIPE,
                "python": platform.python_version(),
                "vocab_size": self.vocab_size,
                "validation_fraction": self.validation_fraction,
                "max_bytes": {name: self._limit(name) for name in self.domains},
                "files": {name: [(file.name, file.size) for file in found] for name, found in files.items()},
            }
            key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
            self._found = (self.cache_dir / f"default-{'-'.join(self.domains)}-{key}", files)
        return self._found

    def _limit(self, name: str) -> int | None:
        return self.max_bytes if self.max_bytes is not None else self._domains[name].max_bytes

    def _build(self, folder: Path, files: dict[str, list[SourceFile]]) -> None:
        """Build beside ``folder`` and rename, so that an interrupted build leaves nothing that looks finished."""
        beside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        with readable_errors(beside, doing="write"):
            beside.mkdir()
        try:
            self._fill(beside, files, config_hash=folder.name)
            with readable_errors(folder, doing="write"):
                beside.rename(folder)
                sync_folder(self.cache_dir)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise

    def _fill(self, folder: Path, files: dict[str, list[SourceFile]], *, config_hash: str) -> None:
        with Progress("Preparing the default corpus (first use only)") as progress:
            splits: dict[str, dict[str, list[str]]] = {}
            seen: set[bytes] = set()
            for name, domain in self._domains.items():
                documents = self._collect(name, files[name], seen, progress)
                splits[name] = split_documents(documents, validation_fraction=self.validation_fraction)
                for split, texts in splits[name].items():
                    if not texts:
                        raise DataError(
                            f"The domain {name!r} ({domain.title}) gives no document for {split} on this machine; "
                            "leave it out of data.corpus.domains or use shards of your own."
                        )
            progress.step("training the tokenizer")
            train = (text for name in self.domains for text in splits[name]["train"])
            tokenizer = train_tokenizer(train, folder / "tokenizer.json", vocab_size=self.vocab_size)
            report: dict[str, Any] = {}
            for name in self.domains:
                for split, texts in splits[name].items():
                    progress.step(f"encoding {name} ({split})", total=len(texts))
                    report[f"{name}-{split}"] = _write(
                        folder / f"{name}-{split}", texts, tokenizer, config_hash=config_hash, progress=progress
                    )
            write_whole(folder / "corpus.json", (json.dumps(report, indent=2) + "\n").encode())
            for name, numbers in report.items():
                progress.say(
                    f"{name}: {count(numbers['documents'])} documents, {size(numbers['bytes'])}, "
                    f"{count(numbers['tokens'])} tokens"
                )

    def _collect(self, name: str, files: list[SourceFile], seen: set[bytes], progress: Progress) -> list[str]:
        """A domain's documents, each text once over all domains."""
        progress.step(f"reading {name} ({self._domains[name].title})", total=len(files))
        documents, left = [], self._limit(name)
        for file in files:
            progress.advance()
            for text in self._domains[name].read(file):
                encoded = text.encode()
                digest = hashlib.sha256(encoded).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                documents.append(text)
                if left is not None:
                    left -= len(encoded)
            if left is not None and left <= 0:
                break
        return documents


def _set_aside(folder: Path, damage: str) -> None:
    aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
    with readable_errors(folder, doing="rename"):
        folder.rename(aside)
    with Progress(f"The default corpus in {folder} is damaged: {damage}") as progress:
        progress.say(f"making it anew; what was there is now {aside}, which may be deleted")


def _write(
    folder: Path, texts: list[str], tokenizer: TokenizerFile, *, config_hash: str, progress: Progress
) -> dict[str, int]:
    writer = ShardWriter(
        folder,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_hash=tokenizer.content_hash,
        config_hash=config_hash,
    )
    with writer:
        for low in range(0, len(texts), _ENCODE_AT_ONCE):
            some = texts[low : low + _ENCODE_AT_ONCE]
            for text, ids in zip(some, tokenizer.encode_batch(some), strict=True):
                writer.add(ids, num_bytes=len(text.encode()))
                progress.advance()
        manifest = writer.close()
    return {"documents": manifest.num_documents, "bytes": manifest.num_bytes, "tokens": manifest.num_tokens}
