"""Which checkpoints a folder holds, found by content and not by name. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_pretrain.distributed.checkpoint import codec, files
from lit_pretrain.distributed.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    TENSORS,
    TREE,
    CheckpointError,
    CheckpointFacts,
    check_content,
    check_listed,
    read_manifest,
    read_small,
    verify,
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint folder whose manifest holds and whose files are there with their sizes.

    Args:
        path: The folder.
        facts: What it says about itself.
        size: Bytes of all its files but the manifest and its seal.
    """

    path: Path
    facts: CheckpointFacts
    size: int


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was meant to be a checkpoint, whatever became of it."""
    return path.is_dir() and any((path / name).exists() for name in (MANIFEST, COMPLETE, TREE, TENSORS))


def _candidates(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from (p for p in sorted(parent.iterdir()) if not files.is_temporary(p) and is_checkpoint(p))


def _look(path: Path) -> Found:
    facts, entries = check_listed(path)
    return Found(path=path, facts=facts, size=sum(entry["bytes"] for entry in entries.values()))


def _age(found: Found) -> tuple[int, int, float, str]:
    facts = found.facts
    return facts.updates_read, facts.global_step, facts.created, found.path.name


def _sorted(parent: Path, *, damaged: Callable[[Path, CheckpointError], None]) -> list[Found]:
    out = []
    for path in _candidates(Path(parent)):
        try:
            out.append(_look(path))
        except CheckpointError as e:
            damaged(path, e)
    return sorted(out, key=_age, reverse=True)


def complete(parent: Path) -> list[Found]:
    """Checkpoints in a folder, newest first: by updates read, then steps, then time of writing, never by name.

    Cheap: checksums of manifests and sizes of files only; ``verify`` reads everything. Empty when there is no such
    folder.
    """
    return _sorted(Path(parent), damaged=lambda path, error: None)


def newest(
    parent: Path, *, accept: Callable[[Found], bool] | None = None, say: Callable[[str], None] | None = None
) -> Found | None:
    """The newest checkpoint of which every byte is as it was written; None when there is none.

    Args:
        parent: The folder that holds the checkpoints.
        accept: Asked before a checkpoint is read; those it refuses are passed over in silence.
        say: Told about every checkpoint that was not taken because it is damaged, and what was taken instead.
    """
    problems: list[str] = []
    found = _sorted(Path(parent), damaged=lambda path, error: problems.append(f"{path.name} was not taken: {error}"))
    taken = None
    for candidate in found:
        if accept is not None and not accept(candidate):
            continue
        try:
            verify(candidate.path)
        except CheckpointError as e:
            problems.append(f"{candidate.path.name} was not taken: {e}")
            continue
        taken = candidate
        break
    if say is not None and problems:
        for problem in problems:
            say(problem)
        if taken is None:
            say(f"{parent} holds no checkpoint that can be read.")
        else:
            say(f"Taken instead: {taken.path.name}, step {taken.facts.global_step}.")
    return taken


def plain(folder: Path, key: str) -> Any:
    """What a checkpoint keeps under one key beside its tensors, in plain containers; None when it has no such key.

    Reads ``trainer.json`` alone, and checks it.

    Raises:
        CheckpointError: The folder or the file is damaged, or tensors stand under that key.
    """
    folder = Path(folder)
    _, entries = read_manifest(folder)
    content = read_small(folder / TREE)
    check_content(folder / TREE, content, entries.get(TREE, {"checksum": f"{files.ALGORITHM}:missing"}))
    return codec.decode(codec.child(json.loads(content)["tree"], key), {})


def prune(
    parent: Path, *, keep_last: int | None = None, keep_every: int | None = None, keep: Iterable[str | Path] = ()
) -> list[Path]:
    """Remove checkpoints that nobody asked to keep, oldest first, and what dead processes left half-written.

    Damaged folders stay, for somebody to look at, and do not count. The newest checkpoint always stays.

    Args:
        parent: The folder that holds the checkpoints.
        keep_last: So many of the newest stay; None: all of them.
        keep_every: Those whose global step is a multiple of this stay.
        keep: Names or paths of others that stay, such as the best.

    Returns:
        What was removed.

    Raises:
        CheckpointError: ``keep_last`` or ``keep_every`` is not positive.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name}={value} must be at least 1; leave it out to keep all.")
    parent = Path(parent)
    removed = clean(parent)
    if keep_last is None:
        return removed
    names = {Path(entry).name for entry in keep}
    for found in reversed(complete(parent)[keep_last:]):
        if found.path.name in names or (keep_every is not None and found.facts.global_step % keep_every == 0):
            continue
        files.remove_tree(found.path)
        removed.append(found.path)
    return removed


def clean(parent: Path) -> list[Path]:
    """Remove temporary folders of processes that are gone; gives what was removed."""
    removed = list(files.abandoned(Path(parent)))
    for path in removed:
        files.remove_tree(path)
    return removed
