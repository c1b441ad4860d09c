"""Where a run keeps its checkpoints, and which is the newest: by content, never by name. No torch, no Lightning."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lit_pretrain.distributed.checkpoint import catalog, files, manifest
from lit_pretrain.distributed.checkpoint.manifest import CheckpointError

FOLDER = "checkpoints"
"""In the run folder."""
LAST = "last.ckpt"
"""The checkpoint of the run's end under Lightning's ModelCheckpoint, when none was due there anyway."""
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "INT")
_MEMOS = ("BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT")


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """One checkpoint: a folder of ours, or a file of Lightning's.

    Args:
        path: Folder or file.
        size: Bytes.
        step: Updates that its weights have seen; None when it cannot be told.
        reason: Why it was saved; empty when it does not say.
        problem: Why it cannot be read; empty for one that looks whole.
    """

    path: Path
    size: int
    step: int | None = None
    reason: str = ""
    problem: str = ""


def listed(folder: Path) -> list[CheckpointFacts]:
    """Checkpoints in a folder, damaged ones too, oldest first; empty when there is no such folder."""
    if not folder.is_dir():
        return []
    paths = [p for p in folder.iterdir() if p.suffix == ".ckpt" and p.is_file()]
    paths += [p for p in folder.iterdir() if catalog.is_checkpoint(p) and not files.is_temporary(p)]
    found = [(look(path), _written(path)) for path in paths]
    return [facts for facts, _ in sorted(found, key=lambda one: (one[0].step or 0, one[1], one[0].path.name))]


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0


def newest(folder: Path, *, say: Callable[[str], None]) -> CheckpointFacts | None:
    """The newest checkpoint of which every byte is as it was written; None where there is none.

    Args:
        folder: Holds the checkpoints.
        say: Told about each that was passed over, and why.
    """
    found = listed(folder)
    for facts in found:
        if facts.problem:  # its age is not known: it may be the newest
            say(f"{facts.path} was passed over: {facts.problem}")
    for facts in reversed([one for one in found if not one.problem]):
        problem = damage(facts.path)
        if not problem:
            return facts
        say(f"{facts.path} was passed over: {problem}")
    return None


def look(path: Path) -> CheckpointFacts:
    """What a checkpoint says of itself, without reading its tensors: a torn one is found, a changed byte is not."""
    return _look_at_folder(path) if path.is_dir() else _look_at_file(path)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, every byte read; empty when nothing is."""
    try:
        if path.is_dir():
            manifest.verify(path)
            return ""
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
            return "" if torn is None else f"{torn} in it is damaged"
    except CheckpointError as e:
        return str(e)
    except (OSError, zipfile.BadZipFile) as e:
        return f"it cannot be read ({e})"


def _look_at_folder(path: Path) -> CheckpointFacts:
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    try:
        facts, _ = manifest.check_listed(path)
    except CheckpointError as e:
        return CheckpointFacts(path=path, size=size, problem=str(e))
    return CheckpointFacts(path=path, size=size, step=facts.global_step, reason=facts.reason)


def _look_at_file(path: Path) -> CheckpointFacts:
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
            if name is None:
                return CheckpointFacts(path=path, size=size, problem="no checkpoint of torch: it has no data.pkl")
            return CheckpointFacts(path=path, size=size, step=_step_in(archive.read(name)))
    except (OSError, zipfile.BadZipFile) as e:
        reason = "torn, or no checkpoint" if isinstance(e, zipfile.BadZipFile) else str(e.strerror)
        return CheckpointFacts(path=path, size=path.stat().st_size if path.exists() else 0, problem=reason)


def _step_in(pickled: bytes) -> int | None:
    """The first number after the key ``global_step``, by reading the pickle's codes: nothing in it runs."""
    is_next = False
    try:
        for code, argument, _ in pickletools.genops(pickled):
            if is_next and code.name in _NUMBERS and isinstance(argument, int):
                return argument
            if code.name not in _MEMOS:
                is_next = argument == "global_step"
    except ValueError:  # not a pickle
        return None
    return None
