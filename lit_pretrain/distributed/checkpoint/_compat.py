"""Names of torch.distributed.checkpoint that are private, and its metadata read without trusting the pickle.

The index of a folder written by torch.distributed.checkpoint (``.metadata``) is a pickle, and stock readers unpickle it
freely. Read here are only the names that such an index needs, and none of them as the real class: stand-ins collect the
values, which are then checked and built into real objects. Can go when torch offers an index that is no pickle
(https://github.com/pytorch/pytorch/issues/52181 is the general complaint). Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

__all__ = ["CURRENT_DCP_VERSION", "CheckpointException", "StorageInfo", "load_metadata", "with_local", "without_crc"]

StorageInfo = _StorageInfo
"""Where one tensor's bytes stand: ``relative_path``, ``offset``, ``length``."""

_METADATA = "torch.distributed.checkpoint.metadata"


def without_crc() -> Any:
    """A context in which torch.save leaves out its own checksums, for this thread: ours cover every byte."""
    from torch.utils.serialization import config

    return config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the same layout around another local part, which may stand on the host.

    ``DTensor.from_local`` would move it to the mesh's device; torch's own staging builds it in this way too.
    """
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _StandIn:
    """Takes what a pickle would have given to a class, and does nothing with it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _allowed() -> dict[tuple[str, str], Any]:
    """Fresh stand-ins for one reading, so that nothing a pickle does to them outlives it."""
    names = {
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
    allowed: dict[tuple[str, str], Any] = {name: type(name[1], (_StandIn,), {}) for name in names}
    for name in dir(torch):
        if type(getattr(torch, name)) is torch.dtype:
            allowed["torch", name] = getattr(torch, name)
    return allowed


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for an outside object, which no index needs")


def load_metadata(data: bytes) -> Metadata:
    """The index in these bytes, built from plain values alone; nothing in it can run.

    Raises:
        ValueError: It asks for a name that no index needs, or is malformed.
    """
    try:
        found = _Unpickler(data).load()
        return _metadata(found)
    except (pickle.UnpicklingError, _MalformedError) as e:
        raise ValueError(str(e)) from e
    except Exception as e:  # a pickle can fail in any way it likes
        raise ValueError(f"it is malformed ({type(e).__name__}: {e})") from e


class _MalformedError(Exception):
    pass


def _state(x: Any, kind: str) -> Any:
    if not isinstance(x, _StandIn) or type(x).__name__ != kind:
        raise _MalformedError(f"it holds a {type(x).__name__} where a {kind} belongs")
    return x.state


def _fields(x: Any, kind: str) -> dict[str, Any]:
    state = _state(x, kind)
    if type(state) is not dict:
        raise _MalformedError(f"its {kind} has no fields")
    return state


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _MalformedError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _size(x: Any) -> torch.Size:
    if not isinstance(x, _StandIn) or type(x).__name__ != "Size" or len(x.arguments) != 1:
        raise _MalformedError(f"it holds a {type(x).__name__} where a size belongs")
    numbers = tuple(x.arguments[0])
    if any(type(n) is not int or n < 0 for n in numbers):
        raise _MalformedError(f"it holds the size {numbers}")
    return torch.Size(numbers)


def _index(x: Any) -> MetadataIndex:
    fields = _fields(x, "MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _size(offset),
        None if hint is None else _typed(hint, int),
    )


def _tensor(x: Any) -> TensorStorageMetadata:
    fields = _fields(x, "TensorStorageMetadata")
    dtype = _state(fields["properties"], "TensorProperties")[0]
    chunks = []
    for chunk in _typed(fields["chunks"], list):
        of_chunk = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(offsets=_size(of_chunk["offsets"]), sizes=_size(of_chunk["sizes"])))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_typed(dtype, torch.dtype)), size=_size(fields["size"]), chunks=chunks
    )


def _storage(x: Any) -> StorageInfo:
    fields = _fields(x, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise _MalformedError("its tensors went through a transformation, which this reader has not")
    path = _typed(fields["relative_path"], str)
    offset, length = _typed(fields["offset"], int), _typed(fields["length"], int)
    if "/" in path or "\\" in path or path in ("", ".", "..") or "\0" in path or offset < 0 or length < 0:
        raise _MalformedError(f"it points to {path!r}, {offset}, {length}")
    return StorageInfo(path, offset, length)


def _metadata(x: Any) -> Metadata:
    fields = _fields(x, "Metadata")
    tensors = {_typed(k, str): _tensor(v) for k, v in _typed(fields["state_dict_metadata"], dict).items()}
    stored = {_index(k): _storage(v) for k, v in _typed(fields["storage_data"], dict).items()}
    for index in stored:
        if index.fqn not in tensors:
            raise _MalformedError(f"it stores {index.fqn!r} without a description")
    return Metadata(
        state_dict_metadata=dict(tensors),
        planner_data=None,
        storage_data=stored,
        storage_meta=StorageMeta(),
        version=str(fields.get("version")),
    )
