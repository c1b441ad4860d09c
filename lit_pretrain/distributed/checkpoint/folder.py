"""A checkpoint folder, written whole or not at all.

::

    step-00000250/
      manifest.json      what the folder is and the checksum of every file in it
      trainer.json       everything that is no tensor
      tensors/           every tensor, as torch.distributed.checkpoint writes it
      rng/rank-00000.json
      COMPLETE           the checksum of manifest.json; written last

Everything is written into a hidden temporary folder beside it, brought to the disk, and renamed.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.distributed.checkpoint._compat import CheckpointException
from lit_pretrain.distributed.checkpoint.contents import load_tensors, read_checkpoint, read_rng, read_tree
from lit_pretrain.distributed.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    RNG,
    TENSORS,
    THREADS,
    TREE,
    CheckpointError,
    CheckpointFacts,
    dump,
    to_json,
    verify,
)
from lit_pretrain.distributed.checkpoint.packing import Packed, pack
from lit_pretrain.distributed.checkpoint.tensors import write_tensors

__all__ = [
    "load_tensors",
    "read_checkpoint",
    "read_rng",
    "read_tree",
    "verify",
    "write_checkpoint",
    "write_packed",
]


def write_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    tree: Any,
    rng: Sequence[Mapping[str, Any]] = (),
    facts: CheckpointFacts,
    process_group: distributed.ProcessGroup | None = None,
    threads: int = THREADS,
) -> CheckpointFacts:
    """Write a checkpoint folder; when this returns, it is on the disk under its name.

    Args:
        folder: Its final name. A checkpoint already there is replaced once the new one is whole.
        tensors: By global name (``model.<name>``, ``optimizer.<i>.<state>.<name>``): plain ones or DTensors.
        tree: Everything that is no tensor; those that stand in it go to the others. Rank 0's counts.
        rng: Random states, one mapping for each rank. Rank 0's counts.
        facts: For the manifest; ``created`` and ``versions`` are set here. Rank 0's count.
        process_group: Of gloo, and for nothing else; every rank of it calls this with the same names and waits until
            the folder is there. None for one process.
        threads: Files written at a time by each rank.

    Returns:
        The facts as written.

    Raises:
        CheckpointError: It cannot be written: on every rank, with nothing left under the name that was not there.
    """
    packed = pack(tensors=tensors, tree=tree, rng=rng, facts=facts)
    return write_packed(folder, packed, process_group=process_group, threads=threads)


def write_packed(
    folder: Path, packed: Packed, *, process_group: distributed.ProcessGroup | None = None, threads: int = THREADS
) -> CheckpointFacts:
    """``write_checkpoint`` with what ``pack`` gave."""
    folder = Path(folder).absolute()
    ranks = _Ranks(process_group)
    temporary = ranks.from_first(lambda: _start(folder))
    try:
        entries = ranks.gather(
            lambda: write_tensors(temporary / TENSORS, packed.tensors, process_group=process_group, threads=threads)
        )
        facts: CheckpointFacts = ranks.from_first(lambda: _finish(folder, temporary, packed, entries))
        return facts
    except BaseException as e:
        if ranks.first:
            files.remove_tree(temporary)
        if isinstance(e, CheckpointError) or not isinstance(e, (Exception, CheckpointException)):
            raise
        raise _failure(folder, e) from e


def _failure(folder: Path, e: BaseException) -> CheckpointError:
    if isinstance(e, CheckpointException):  # of several ranks; not an Exception, by torch's choice
        rank, (cause, _) = min(e.failures.items())
        reason = f"rank {rank}: {cause}"
    else:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}"
    return CheckpointError(
        f"{folder} could not be written ({reason}); free space or set keep_last lower; earlier checkpoints are "
        "untouched."
    )


def _start(folder: Path) -> Path:
    temporary = folder.with_name(files.temporary_name(folder.name))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        (temporary / TENSORS).mkdir(parents=True)
        (temporary / RNG).mkdir()
    except OSError as e:
        files.remove_tree(temporary)
        raise _failure(folder, e) from e
    return temporary


def _finish(
    folder: Path, temporary: Path, packed: Packed, by_rank: Sequence[Mapping[str, dict[str, Any]]]
) -> CheckpointFacts:
    facts = replace(packed.facts, created=time.time(), versions=_versions())
    entries = {f"{TENSORS}/{name}": entry for part in by_rank for name, entry in part.items()}
    entries[TREE] = files.write_new(temporary / TREE, dump(packed.tree))
    for state in packed.rng:
        name = f"{RNG}/rank-{state['rank']:05d}.json"
        entries[name] = files.write_new(temporary / name, dump(state))
    manifest = dump(to_json(facts, entries), indent=1)
    files.write_new(temporary / MANIFEST, manifest)
    files.write_new(temporary / COMPLETE, files.checksum(manifest).encode() + b"\n")
    for inner in (TENSORS, RNG, "."):
        files.sync_folder(temporary / inner)
    files.publish(temporary, folder)
    return facts


def _versions() -> dict[str, str]:
    out = {"torch": str(torch.__version__)}
    for key, name in (("lit_pretrain", "lit-pretrain"), ("lightning", "lightning")):
        try:
            out[key] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[key] = "unknown"
    return out


class _Ranks:
    """The ranks of a group, or this process alone; an error of one is raised by all."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self._group = group
        self.first = group is None or distributed.get_rank(group) == 0

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Each rank's result, on every rank."""
        if self._group is None:
            return [work()]
        try:
            mine: tuple[Any, str | None] = work(), None
        except Exception as e:
            mine = None, f"{type(e).__name__}: {e}"
        every: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(every, mine, group=self._group)
        for rank, (_, error) in enumerate(every):
            if error is not None:
                raise RuntimeError(f"rank {rank}: {error}")
        return [result for result, _ in every]

    def from_first(self, work: Callable[[], Any]) -> Any:
        """What rank 0 did, on every rank."""
        return self.gather(lambda: work() if self.first else None)[0]
