"""What a checkpoint folder holds. Whatever is read is checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_pretrain.distributed.checkpoint.codec import decode
from lit_pretrain.distributed.checkpoint.manifest import (
    RNG,
    THREADS,
    TREE,
    CheckpointError,
    check_content,
    check_listed,
    read_small,
)
from lit_pretrain.distributed.checkpoint.packing import EXTRA
from lit_pretrain.distributed.checkpoint.reader import read_tensors, read_tensors_into


def read_tree(folder: Path, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """A checkpoint's tree without reading its large tensors: those that stand in the tree only.

    Raises:
        CheckpointError: The folder is damaged.
    """
    _, entries = check_listed(Path(folder))
    plain = _plain_tree(Path(folder), entries)
    if tensors is None:
        aliases = plain["aliases"]
        wanted = {aliases.get(name, name) for name in aliases if name.startswith(EXTRA)}
        read = read_tensors(Path(folder), entries, keys=lambda name: name.startswith(EXTRA) or name in wanted)
        tensors = _with_aliases(read, plain["aliases"])
    return decode(plain["tree"], {name.removeprefix(EXTRA): t for name, t in tensors.items() if name.startswith(EXTRA)})


def _plain_tree(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    path = folder / TREE
    if TREE not in entries:
        raise CheckpointError(f"{path} is not in the manifest; take another checkpoint.")
    content = read_small(path)
    check_content(path, content, entries[TREE])
    try:
        plain = json.loads(content)
        return {"tree": plain["tree"], "aliases": dict(plain["aliases"])}
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read ({type(e).__name__}: {e}); take another checkpoint.") from e


def _with_aliases(tensors: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    return tensors | {name: tensors[first] for name, first in aliases.items() if first in tensors}


def read_checkpoint(
    folder: Path, *, keys: Callable[[str], bool] | None = None, threads: int = THREADS
) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint's tree and its named tensors, whole and on the host. Every file read is checked as it is read.

    Args:
        folder: The checkpoint.
        keys: Which named tensors, such as ``lambda name: name.startswith("model.")``; None for all, and then every
            byte of the folder has been checked when this returns.
        threads: Files read at a time.

    Raises:
        CheckpointError: A file is missing, damaged or not trusted.
    """
    folder = Path(folder)
    _, entries = check_listed(folder)
    plain = _plain_tree(folder, entries)
    aliases = plain["aliases"]
    wanted = None
    if keys is not None:
        chosen = keys
        needed = {first for name, first in aliases.items() if name.startswith(EXTRA) or keys(name)}
        wanted = lambda name: name.startswith(EXTRA) or name in needed or chosen(name)  # noqa: E731
    every = _with_aliases(read_tensors(folder, entries, keys=wanted, threads=threads), aliases)
    tree = read_tree(folder, tensors=every)
    if keys is None:
        read_rng(folder)
    named = {name: tensor for name, tensor in every.items() if not name.startswith(EXTRA)}
    return tree, {name: tensor for name, tensor in named.items() if keys is None or keys(name)}


def load_tensors(folder: Path, targets: Mapping[str, Tensor], *, threads: int = THREADS) -> None:
    """Fill given tensors from a checkpoint in place: plain ones or DTensors of any layout.

    No rank waits for another: who calls it on several agrees afterwards that all went well.

    Args:
        folder: The checkpoint.
        targets: By global name.
        threads: Files read at a time.

    Raises:
        CheckpointError: A file is damaged, a name is missing, or a shape differs.
    """
    folder = Path(folder)
    _, entries = check_listed(folder)
    aliases = _plain_tree(folder, entries)["aliases"]
    direct = {name: target for name, target in targets.items() if name not in aliases}
    read_tensors_into(folder, entries, direct, threads=threads)
    rest: dict[str, Tensor] = {name: target for name, target in targets.items() if name in aliases}
    while rest:  # two targets of one stored tensor: in turns
        turn: dict[str, Tensor] = {}
        for name, target in rest.items():
            turn.setdefault(aliases[name], target)
        read_tensors_into(folder, entries, turn, threads=threads)
        done = {id(target) for target in turn.values()}
        rest = {name: target for name, target in rest.items() if id(target) not in done}


def read_rng(folder: Path) -> list[dict[str, Any]]:
    """Random states by rank; empty when none were saved.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    folder = Path(folder)
    _, entries = check_listed(folder)
    states = []
    for name in sorted(entry for entry in entries if entry.startswith(f"{RNG}/")):
        content = read_small(folder / name)
        check_content(folder / name, content, entries[name])
        try:
            states.append(decode(json.loads(content)["state"], {}))
        except (ValueError, KeyError, TypeError) as e:
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(f"{folder / name} cannot be read ({e}); take another checkpoint.") from e
    return states
