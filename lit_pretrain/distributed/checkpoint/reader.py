"""Tensors from a folder of torch.distributed.checkpoint: every file read is checked, and no pickle is trusted."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lit_pretrain.distributed.checkpoint._compat import StorageInfo, load_metadata
from lit_pretrain.distributed.checkpoint.manifest import (
    TENSORS,
    THREADS,
    CheckpointError,
    check_content,
    check_file,
    read_small,
)
from lit_pretrain.distributed.checkpoint.tensors import FILE_BYTES, METADATA


def read_metadata(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> Metadata:
    """The index of a checkpoint's tensors, after its checksum was compared, without trusting the pickle it is.

    Args:
        folder: The checkpoint.
        entries: Of its manifest.

    Raises:
        CheckpointError: It is missing, damaged, or holds what no index needs; nothing in it was run.
    """
    name = f"{TENSORS}/{METADATA}"
    path = Path(folder) / name
    if name not in entries:
        raise CheckpointError(f"{path} is not in the manifest; take another checkpoint.")
    content = read_small(path)
    check_content(path, content, entries[name])
    try:
        metadata = load_metadata(content)
    except ValueError as e:
        raise CheckpointError(f"{path} is not trusted: {e}; nothing in it was run; do not use this checkpoint.") from e
    for where in metadata.storage_data.values():
        if f"{TENSORS}/{where.relative_path}" not in entries:
            raise CheckpointError(
                f"{path} points to {where.relative_path}, which is not in the manifest; take another checkpoint."
            )
    return metadata


def _checked(path: Path, entry: Mapping[str, Any]) -> BinaryIO:
    """A file whose bytes have been compared; in memory, so that it is read once, unless it holds one large tensor."""
    try:
        if entry["bytes"] > 4 * FILE_BYTES:
            check_file(path, entry)
            return open(path, "rb")
        content = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e}); take an earlier checkpoint.") from e
    check_content(path, content, entry)
    return io.BytesIO(content)


def _files(
    folder: Path,
    wanted: Mapping[str, list[tuple[StorageInfo, Any]]],
    entries: Mapping[str, Mapping[str, Any]],
    take: Callable[[Tensor, Any], None],
    *,
    threads: int,
) -> None:
    """Read files whole, check them, and hand the wanted tensors on."""

    def one(name: str) -> None:
        path = folder / TENSORS / name
        entry = entries[f"{TENSORS}/{name}"]
        with _checked(path, entry) as stream:
            for where, what in sorted(wanted[name], key=lambda pair: pair[0].offset):
                stream.seek(where.offset)
                try:
                    tensor = torch.load(io.BytesIO(stream.read(where.length)), map_location="cpu", weights_only=True)
                except Exception as e:
                    raise CheckpointError(f"{path} holds no tensor at {where.offset} ({e}); take another.") from e
                if not isinstance(tensor, Tensor):
                    raise CheckpointError(f"{path} holds a {type(tensor).__name__} at {where.offset}; take another.")
                take(tensor, what)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, wanted))


def read_tensors(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    *,
    keys: Callable[[str], bool] | None = None,
    threads: int = THREADS,
) -> dict[str, Tensor]:
    """A checkpoint's tensors, whole and on the host, by name; every file read is checked.

    Args:
        folder: The checkpoint.
        entries: Of its manifest.
        keys: Which names; None for all.
        threads: Files read at a time.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    metadata = read_metadata(folder, entries)
    described: dict[str, Any] = {k: v for k, v in metadata.state_dict_metadata.items() if keys is None or keys(k)}
    out: dict[str, Tensor] = {}
    for name, tensor in described.items():
        if len(tensor.chunks) != 1:
            out[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    missing = {name: len(tensor.chunks) for name, tensor in described.items()}
    wanted: dict[str, list[tuple[StorageInfo, Any]]] = {}
    for index, where in metadata.storage_data.items():
        if index.fqn in described:
            wanted.setdefault(where.relative_path, []).append((where, index))
            missing[index.fqn] -= 1
    for name, count in missing.items():
        if count != 0:
            raise CheckpointError(f"{folder} lacks a part of {name}; take another checkpoint.")

    def take(tensor: Tensor, index: MetadataIndex) -> None:
        whole = described[index.fqn]
        if index.fqn in out:
            target = out[index.fqn]
            for dim, (low, size) in enumerate(zip(index.offset or (), tensor.shape, strict=True)):
                target = target.narrow(dim, low, size)
            target.copy_(tensor)
        elif tensor.shape == whole.size and tensor.dtype == whole.properties.dtype:
            out[index.fqn] = tensor
        else:
            raise CheckpointError(f"{folder} holds {index.fqn} in another shape or dtype; take another checkpoint.")

    _files(Path(folder), wanted, entries, take, threads=threads)
    return {name: out[name] for name in described}


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]], *, threads: int) -> None:
        super().__init__(folder / TENSORS)
        self._folder, self._entries, self._threads = folder, entries, threads

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[tuple[StorageInfo, Any]]] = {}
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            wanted.setdefault(where.relative_path, []).append((where, item))

        def take(tensor: Tensor, item: Any) -> None:
            for dim, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, low, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)

        _files(self._folder, wanted, self._entries, take, threads=self._threads)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_tensors_into(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Tensor],
    *,
    threads: int = THREADS,
) -> None:
    """Fill given tensors in place, plain ones or DTensors of any layout, each rank what it holds.

    No rank waits for another: who calls it on several agrees afterwards that all went well.

    Raises:
        CheckpointError: A file is damaged, a name is missing, or a shape differs.
    """
    metadata = read_metadata(folder, entries)
    for name, target in targets.items():
        described = metadata.state_dict_metadata.get(name)
        if described is None:
            raise CheckpointError(f"{folder} has no tensor {name}; it is of another model, or saves less.")
        assert isinstance(described, TensorStorageMetadata)
        if described.size != target.shape:
            raise CheckpointError(
                f"{folder} holds {name} in shape {tuple(described.size)} and the model needs {tuple(target.shape)}; "
                "build the model that was saved."
            )
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    state: dict[str, Any] = dict(targets)
    planner.set_up_planner(state, metadata, True)
    reader = _Reader(Path(folder), entries, threads=threads)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
