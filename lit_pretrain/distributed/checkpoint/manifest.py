"""What stands in a checkpoint's manifest, and whether the folder is what it says. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.errors import ConfigError

FORMAT = "lit-pretrain-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
TREE = "trainer.json"
TENSORS = "tensors"
RNG = "rng"
COMPLETE = "COMPLETE"
THREADS = 2  # hashing and reading release the interpreter; more would only take cores from a training next to it
LARGEST_JSON = 1 << 28  # bytes: a manifest or a tree beyond this is not one of ours


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, or a folder is not one that can be read."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says about itself.

    Args:
        global_step: Optimizer steps done, in Lightning's count.
        microbatches_read: Data position: microbatches read by each data-parallel rank.
        updates_read: Data position: global batches read. Never goes back, also not in a rollback.
        reason: ``interval``, ``end``, ``preemption``, ``exception`` or ``best``.
        monitors: Watched values by name.
        ledger_length: Entries of the skip ledger when it was written.
        notes: Further plain JSON, read by whoever wrote it.
        created: Unix time; set by the writer.
        versions: Of ``lit_pretrain``, ``torch`` and ``lightning``; set by the writer.
    """

    global_step: int
    microbatches_read: int = 0
    updates_read: int = 0
    reason: str = "interval"
    monitors: Mapping[str, float] = field(default_factory=dict)
    ledger_length: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)


def to_json(facts: CheckpointFacts, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest.

    Args:
        facts: All set.
        entries: ``{relative path: {"bytes": n, "checksum": "algorithm:hex"}}`` of every other file.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "global_step": facts.global_step,
        "data_position": {"microbatches": facts.microbatches_read, "updates": facts.updates_read},
        "reason": facts.reason,
        "monitors": {name: _number(value) for name, value in facts.monitors.items()},
        "created": facts.created,
        "ledger_length": facts.ledger_length,
        "versions": dict(facts.versions),
        "notes": dict(facts.notes),
        "files": {name: dict(entry) for name, entry in sorted(entries.items())},
    }


def _number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)  # JSON has neither nan nor inf


def dump(value: Any, *, indent: int | None = None) -> bytes:
    """Strict JSON. Large values go without an indent, with which Python's encoder is many times slower."""
    return json.dumps(value, indent=indent, allow_nan=False).encode() + b"\n"


def read_manifest(folder: Path) -> tuple[CheckpointFacts, dict[str, dict[str, Any]]]:
    """Facts and file entries, once ``COMPLETE`` vouches for the manifest; no other file is opened.

    Raises:
        CheckpointError: The folder is missing, unfinished or damaged, or of another format or version.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}; name a folder that holds a {MANIFEST}.")
    try:
        seal = (folder / COMPLETE).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {COMPLETE} file: its saving was cut off; take an earlier one."
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({e}); take an earlier checkpoint.") from e
    content = read_small(folder / MANIFEST)
    try:
        found = files.checksum(content, algorithm=seal.partition(":")[0])
    except ValueError as e:
        raise CheckpointError(f"{folder / COMPLETE} is damaged ({e}); take an earlier checkpoint.") from e
    if found != seal:
        raise CheckpointError(f"{folder / MANIFEST} does not fit to {COMPLETE} (checksum); take an earlier checkpoint.")
    return _parse(folder / MANIFEST, content)


def read_small(path: Path) -> bytes:
    """A file that must exist and be small.

    Raises:
        CheckpointError: naming it.
    """
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} is too large to be one of ours; take an earlier checkpoint.")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; take an earlier checkpoint.") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e}); take an earlier checkpoint.") from e


def _parse(path: Path, content: bytes) -> tuple[CheckpointFacts, dict[str, dict[str, Any]]]:
    try:
        plain = json.loads(content)
        if plain["format"] != FORMAT:
            raise CheckpointError(f"{path} says format {plain['format']!r}, not {FORMAT!r}; name one of our folders.")
        if plain["version"] != VERSION:
            raise CheckpointError(
                f"{path} has format version {plain['version']!r} and this lit-pretrain reads version {VERSION}; "
                "use the release that wrote it, or a newer one."
            )
        facts = CheckpointFacts(
            global_step=int(plain["global_step"]),
            microbatches_read=int(plain["data_position"]["microbatches"]),
            updates_read=int(plain["data_position"]["updates"]),
            reason=str(plain["reason"]),
            monitors={str(name): float(value) for name, value in plain["monitors"].items()},
            ledger_length=int(plain["ledger_length"]),
            notes=dict(plain["notes"]),
            created=float(plain["created"]),
            versions={str(name): str(value) for name, value in plain["versions"].items()},
        )
        entries = {
            str(name): {"bytes": int(entry["bytes"]), "checksum": str(entry["checksum"])}
            for name, entry in plain["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a manifest ({type(e).__name__}: {e}); take another checkpoint.") from e
    for name in entries:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or not parts or "\0" in name:
            raise CheckpointError(f"{path} lists {name!r}, which is outside the folder; do not use this checkpoint.")
    return facts, entries


def check_size(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """One file is there, with its bytes.

    Raises:
        CheckpointError: naming it.
    """
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path} is missing; take an earlier checkpoint.") from None
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{path} has {size} bytes where {entry['bytes']} were written; take an earlier checkpoint."
        )


def check_content(path: Path, data: Any, entry: Mapping[str, Any]) -> None:
    """Bytes in memory are those that were written.

    Raises:
        CheckpointError: naming the file.
    """
    compare(path, files.checksum(data, algorithm=algorithm(path, entry)).partition(":")[2], entry)


def check_file(path: Path, entry: Mapping[str, Any]) -> None:
    """A whole file is what was written.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        found = files.checksum_file(path, algorithm=algorithm(path, entry))
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e}); take an earlier checkpoint.") from e
    compare(path, found.partition(":")[2], entry)


def algorithm(path: Path, entry: Mapping[str, Any]) -> str:
    """The checksum algorithm of a file's entry.

    Raises:
        CheckpointError: It is one that this version does not know.
    """
    name = str(entry["checksum"]).partition(":")[0]
    try:
        files.new_hash(name)
    except ValueError as e:
        raise CheckpointError(f"{path} cannot be checked ({e}); use the lit-pretrain that wrote it.") from e
    return name


def compare(path: Path, found: str, entry: Mapping[str, Any]) -> None:
    """A checksum, in hexadecimal digits, is the one that was written down.

    Raises:
        CheckpointError: It is not.
    """
    if found != str(entry["checksum"]).partition(":")[2]:
        raise CheckpointError(f"{path} is damaged (checksum); take an earlier checkpoint.")


def check_listed(folder: Path) -> tuple[CheckpointFacts, dict[str, dict[str, Any]]]:
    """Facts and entries of a folder whose manifest holds and whose files are all there, with their sizes.

    Raises:
        CheckpointError: naming the first file that is not.
    """
    folder = Path(folder)
    facts, entries = read_manifest(folder)
    for name, entry in entries.items():
        check_size(folder, name, entry)
    return facts, entries


def verify(folder: Path) -> CheckpointFacts:
    """The facts of a checkpoint of which every byte is as it was written.

    Raises:
        CheckpointError: one sentence that names the first file that is not.
    """
    folder = Path(folder)
    facts, entries = check_listed(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda item: check_file(folder / item[0], item[1]), entries.items()))
    return facts
