"""Tensors from a folder of torch.distributed.checkpoint: every file read is checked, and no pickle is trusted."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.distributed.checkpoint._compat import StorageInfo, load_metadata
from lit_pretrain.distributed.checkpoint.blob import Containers, raw
from lit_pretrain.distributed.checkpoint.manifest import (
    TENSORS,
    THREADS,
    CheckpointError,
    algorithm,
    check_content,
    compare,
    read_small,
)
from lit_pretrain.distributed.checkpoint.tensors import METADATA


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


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A stored tensor, or part of one, and what it is wanted for."""

    where: StorageInfo
    dtype: torch.dtype
    shape: torch.Size
    what: Any


class _File:
    """Reads a file of tensors from its first byte to its last, once, hashing all of it."""

    def __init__(self, path: Path, entry: Mapping[str, Any], containers: Containers) -> None:
        self._path, self._entry, self._containers = path, entry, containers
        self._hash = files.new_hash(algorithm(path, entry))
        self._at = 0
        self._file: BinaryIO

    def read(self, wanted: list[_Wanted]) -> list[tuple[Tensor, Any]]:
        """The wanted tensors, once every byte of the file has been compared.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        try:
            with open(self._path, "rb", buffering=0) as self._file:
                found = [(self._one(item), item) for item in sorted(wanted, key=lambda item: item.where.offset)]
                self._skip(self._entry["bytes"] - self._at)
        except (OSError, EOFError) as e:
            raise CheckpointError(f"{self._path} cannot be read ({e}); take an earlier checkpoint.") from e
        compare(self._path, self._hash.hexdigest(), self._entry)
        return [(self._loaded(content, item), item.what) for content, item in found]

    def _fill(self, view: memoryview) -> None:
        for low in range(0, len(view), files.CHUNK):
            part = view[low : low + files.CHUNK]
            done = 0
            while done < len(part):
                size = self._file.readinto(part[done:])  # type: ignore[attr-defined]
                if not size:
                    raise EOFError("it ends too early")
                done += size
            self._hash.update(part)
        self._at += len(view)

    def _take(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _skip(self, size: int) -> None:
        if size < 0:
            raise EOFError("its index points into what was read already")
        scratch = memoryview(bytearray(min(size, files.CHUNK)))
        while size > 0:
            part = scratch[: min(size, len(scratch))]
            self._fill(part)
            size -= len(part)

    def _one(self, item: _Wanted) -> Tensor | bytes:
        """A tensor read in place, or the archive of torch.save where it is not one of those known."""
        self._skip(item.where.offset - self._at)
        around = self._containers.around(item.dtype, item.shape)
        size = item.shape.numel() * item.dtype.itemsize
        if around is None or item.where.length != len(around[0]) + size + len(around[1]):
            return self._take(item.where.length)
        head = self._take(len(around[0]))
        if head != around[0]:
            return head + self._take(item.where.length - len(head))
        tensor = torch.empty(item.shape, dtype=item.dtype)
        self._fill(raw(tensor))
        tail = self._take(len(around[1]))
        return tensor if tail == around[1] else head + bytes(raw(tensor)) + tail

    def _loaded(self, content: Tensor | bytes, item: _Wanted) -> Tensor:
        if isinstance(content, Tensor):
            return content
        try:
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as e:
            raise CheckpointError(f"{self._path} holds no tensor at {item.where.offset} ({e}); take another.") from e
        if not isinstance(tensor, Tensor) or tensor.shape != item.shape or tensor.dtype != item.dtype:
            raise CheckpointError(f"{self._path} holds something else at {item.where.offset}; take another checkpoint.")
        return tensor


def _read_files(
    folder: Path,
    wanted: Mapping[str, list[_Wanted]],
    entries: Mapping[str, Mapping[str, Any]],
    take: Callable[[Tensor, Any], None],
    *,
    threads: int,
) -> None:
    """Hand on the wanted tensors of files, each file whole and checked first."""
    containers = Containers()

    def one(name: str) -> None:
        for tensor, what in _File(folder / TENSORS / name, entries[f"{TENSORS}/{name}"], containers).read(wanted[name]):
            take(tensor, what)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, wanted))


def _chunk(metadata: Metadata, index: MetadataIndex, what: Any) -> _Wanted:
    described: Any = metadata.state_dict_metadata[index.fqn]
    offset = index.offset if index.offset is not None else torch.Size([0] * len(described.size))
    shape = next((chunk.sizes for chunk in described.chunks if chunk.offsets == offset), None)
    if shape is None:
        raise CheckpointError(f"the index has no part of {index.fqn} at {tuple(offset)}; take another checkpoint.")
    where = metadata.storage_data[index]
    return _Wanted(where=where, dtype=described.properties.dtype, shape=shape, what=what)


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
    wanted: dict[str, list[_Wanted]] = {}
    for index, where in metadata.storage_data.items():
        if index.fqn in described:
            wanted.setdefault(where.relative_path, []).append(_chunk(metadata, index, index))
            missing[index.fqn] -= 1
    for name, count in missing.items():
        if count != 0:
            raise CheckpointError(f"{folder} lacks a part of {name}; take another checkpoint.")

    def take(tensor: Tensor, index: MetadataIndex) -> None:
        if index.fqn in out:
            target = out[index.fqn]
            for dim, (low, size) in enumerate(zip(index.offset or (), tensor.shape, strict=True)):
                target = target.narrow(dim, low, size)
            target.copy_(tensor)
        else:
            out[index.fqn] = tensor

    _read_files(Path(folder), wanted, entries, take, threads=threads)
    return {name: out[name] for name in described}


class _Reader(FileSystemReader):
    def __init__(
        self, folder: Path, entries: Mapping[str, Mapping[str, Any]], metadata: Metadata, *, threads: int
    ) -> None:
        super().__init__(folder / TENSORS)
        self._folder, self._entries, self._metadata, self._threads = folder, entries, metadata, threads

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            chunk = _chunk(self._metadata, item.storage_index, item)
            wanted.setdefault(chunk.where.relative_path, []).append(chunk)

        def take(tensor: Tensor, item: Any) -> None:
            for dim, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, low, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)

        _read_files(self._folder, wanted, self._entries, take, threads=self._threads)
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
    reader = _Reader(Path(folder), entries, metadata, threads=threads)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
