"""The user's own text as shards: found, divided, encoded on all cores, gone on with after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_pretrain.corpus import journal
from lit_pretrain.corpus._files import locked, write_whole
from lit_pretrain.corpus._progress import Progress
from lit_pretrain.corpus._workers import encode_units
from lit_pretrain.corpus.encode import Encoding, Tally, unit_folder, usable_documents
from lit_pretrain.corpus.holdout import holdout_limit, holdout_mark
from lit_pretrain.corpus.prepare_settings import TRAIN, PrepareSettings
from lit_pretrain.corpus.sources import Found, Piece, find_inputs, plan_units, unit_size
from lit_pretrain.corpus.tokenizer import EOS_TOKEN, TokenizerFile, train_tokenizer
from lit_pretrain.corpus.tokenizer_sources import TokenizerSource, load_tokenizer
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.units import count, size

__all__ = ["PrepareSettings", "Prepared", "prepare"]

_RECIPE = 1  # raise it when the same input would give other bytes
_LOSSLESS_BYTES = 2**20  # of text that is encoded and decoded again
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A finished preparation.

    Args:
        folder: Holds the splits' shard folders and ``tokenizer.json``.
        record: Content of ``prepare.json``.
        fresh: Whether this call did any work.
        seconds: Spent on encoding, by this call.
        encoded_bytes: Of text, encoded by this call.
    """

    folder: Path
    record: Mapping[str, Any]
    fresh: bool
    seconds: float = 0.0
    encoded_bytes: int = 0


def prepare(settings: PrepareSettings) -> Prepared:
    """Turn text into shards, or go on where an earlier call was interrupted.

    The bytes written depend on the input and the settings alone. Documents are not deduplicated. Workers are spawned:
    a script calls this below ``if __name__ == "__main__"``, or with ``workers=0``.

    Raises:
        ConfigError: A setting is impossible, or the folder holds something else.
        DataError: The input cannot be read or holds no documents, or the output cannot be written.
    """
    found = find_inputs(settings.input, format=settings.format, reading=settings.reading)
    given = (
        None
        if settings.tokenizer == TRAIN
        else load_tokenizer(settings.tokenizer, eos_token=settings.eos_token, pattern=settings.tokenizer_pattern)
    )
    identity = _identity(settings, found, given)
    output = settings.output.expanduser()
    if (done := journal.finished(output, identity)) is not None:
        return Prepared(folder=output, record=done, fresh=False)
    _check_usable(settings, found)
    parts = journal.open_parts(output)
    with locked(parts / "lock"):
        if (done := journal.finished(output, identity)) is not None:  # by another process, meanwhile
            return Prepared(folder=output, record=done, fresh=False)
        journal.begin(output, identity)
        with Progress(f"Preparing {output}") as progress:
            return _run(settings, found, given, identity, parts, progress)


def _check_usable(settings: PrepareSettings, found: Found) -> None:
    """Refuse input that cannot give a single document, before anything is written."""
    output = settings.output.expanduser().absolute()
    for file in found.files:
        if Path(file.path).is_relative_to(output):
            raise ConfigError(f"output={settings.output} holds {file.name}, which is input; choose another folder.")
    tally, strict = Tally(), settings.errors == "strict"
    for file in found.files:
        for unit in plan_units([file], reading=settings.reading, unit_bytes=file.size + 1):
            if any(usable_documents(unit, reading=settings.reading, strict=strict, tally=tally)):
                return
    raise DataError(journal.nothing_usable(tally))


def _run(
    settings: PrepareSettings,
    found: Found,
    given: TokenizerSource | None,
    identity: dict[str, Any],
    parts: Path,
    progress: Progress,
) -> Prepared:
    total = sum(file.size for file in found.files)
    left_out = ", ".join(f"{number} {ending}" for ending, number in found.left_out.items())
    progress.say(f"{len(found.files)} files, {size(total)}{f'; left out: {left_out}' if left_out else ''}")
    units = plan_units(found.files, reading=settings.reading, unit_bytes=settings.unit_bytes or unit_size(total))
    tokenizer = _tokenizer(settings, given, units, progress)
    encoding = Encoding(
        folder=parts,
        tokenizer=tokenizer.path,
        eos_token=tokenizer.eos_token,
        reading=settings.reading,
        validation_fraction=settings.validation_fraction,
        strict=settings.errors == "strict",
        config_hash=_config_hash(identity, tokenizer),
    )
    _check_lossless(units, settings, tokenizer, progress)
    left = {number: unit for number, unit in enumerate(units) if not unit_folder(parts, number).is_dir()}
    sizes = {number: sum(piece.size for piece in unit) for number, unit in left.items()}
    if len(left) < len(units):
        progress.say(f"{len(units) - len(left)} of {len(units)} units were encoded before; going on")
    workers = _cores() if settings.workers is None else settings.workers
    began = time.monotonic()
    if left:
        progress.step(f"encoding with {min(workers, len(left)) or 1} processes (MiB)", total=_mib(sum(sizes.values())))
        behind = 0
        for number in encode_units(left, encoding=encoding, workers=workers):
            behind += sizes[number]
            progress.advance(behind // _MIB)
            behind %= _MIB
    seconds = time.monotonic() - began
    encoded = journal.encoded_bytes(parts, left)
    progress.step("putting the shards together")
    record = journal.finish(settings.output.expanduser(), identity, tokenizer=tokenizer, num_units=len(units))
    return Prepared(
        folder=settings.output.expanduser(),
        record=record,
        fresh=True,
        seconds=seconds,
        encoded_bytes=encoded,
    )


def _identity(settings: PrepareSettings, found: Found, given: TokenizerSource | None) -> dict[str, Any]:
    """All that decides the bytes written; where the input lies does not."""
    trained = {"vocab_size": settings.vocab_size, "sample_bytes": settings.sample_bytes}
    return {
        "recipe": _RECIPE,
        **asdict(settings.reading),
        "tokenizer": trained if given is None else hashlib.sha256(given.content.encode()).hexdigest(),
        "eos_token": EOS_TOKEN if given is None else given.eos_token,
        "validation_fraction": float(settings.validation_fraction),
        "errors": settings.errors,
        "unit_bytes": settings.unit_bytes,
        "files": [[file.name, file.kind, file.size, file.stamp] for file in found.files],
    }


def _config_hash(identity: dict[str, Any], tokenizer: TokenizerFile) -> str:
    """Without times, so that copied input gives the same shards."""
    files = [[name, kind, size] for name, kind, size, _ in identity["files"]]
    decisive = {**identity, "files": files, "tokenizer": tokenizer.content_hash}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _tokenizer(
    settings: PrepareSettings,
    given: TokenizerSource | None,
    units: list[list[Piece]],
    progress: Progress,
) -> TokenizerFile:
    """The tokenizer in the output folder; a trained one is there already after an interruption."""
    path = settings.output.expanduser() / journal.TOKENIZER
    if given is not None:
        write_whole(path, given.content.encode())
        tokenizer = TokenizerFile(path, eos_token=given.eos_token)
        origin = f"from {given.origin}"
    elif path.exists():
        tokenizer, origin = TokenizerFile(path), "trained before"
    else:
        progress.step(f"training the tokenizer on {size(settings.sample_bytes)} at most, evenly from the input")
        texts = _sample(units, settings, settings.sample_bytes)
        tokenizer = train_tokenizer(texts, path, vocab_size=settings.vocab_size)
        origin = "trained"
    progress.say(
        f"tokenizer {origin}: vocab_size={tokenizer.vocab_size}, documents end with {tokenizer.eos_token} "
        f"(id {tokenizer.eos_id})"
    )
    return tokenizer


def _sample(units: list[list[Piece]], settings: PrepareSettings, num_bytes: int) -> Iterator[str]:
    """The first training documents of every unit, in equal shares of ``num_bytes``."""
    limit = holdout_limit(settings.validation_fraction)
    strict = settings.errors == "strict"
    left = num_bytes
    for number, unit in enumerate(units):
        share = left // (len(units) - number)
        for document in usable_documents(unit, reading=settings.reading, strict=strict):
            if share <= 0:
                break
            if holdout_mark(document.text) >= limit:
                share -= document.num_bytes
                left -= document.num_bytes
                yield document.text


def _check_lossless(
    units: list[list[Piece]], settings: PrepareSettings, tokenizer: TokenizerFile, progress: Progress
) -> None:
    """Say whether encoding and decoding gives the same text back."""
    texts = list(_sample(units[:: max(1, len(units) // 8)], settings, _LOSSLESS_BYTES))
    exact = sum(tokenizer.decode(ids) == text for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True))
    if exact == len(texts):
        progress.say(f"lossless: {count(exact)} sample documents come back exactly after encoding and decoding")
    else:
        progress.say(
            f"NOT lossless: {len(texts) - exact} of {len(texts)} sample documents come back changed after encoding and "
            "decoding; this tokenizer rewrites text, so bits per byte will not be exact"
        )


def _mib(num_bytes: int) -> int:
    return num_bytes // _MIB


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
