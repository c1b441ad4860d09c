"""Tensors into a folder that torch.distributed.checkpoint reads, with a checksum of every file."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.distributed.checkpoint._compat import CURRENT_DCP_VERSION, StorageInfo, without_crc
from lit_pretrain.distributed.checkpoint.blob import ALIGNMENT, Containers, raw
from lit_pretrain.distributed.checkpoint.manifest import THREADS

FILE_BYTES = 1 << 26  # of tensors in one file: while one is brought to the disk, the next is hashed and written
METADATA = ".metadata"


class Stream:
    """What torch.save writes into. It keeps an error for later: torch.save turns most into "unexpected pos"."""

    def __init__(self, sink: files.Sink) -> None:
        self._sink = sink
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Take everything; after an error, in vain."""
        if self.error is None:
            try:
                return self._sink.write(data)
            except BaseException as e:  # raised by the caller, once torch.save has returned
                self.error = e
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing: the sink is finished by whoever opened it."""

    def save(self, value: Any) -> None:
        """torch.save, and the error that writing met, as it was."""
        torch.save(value, self)  # type: ignore[arg-type]  # write and flush are all it needs
        if self.error is not None:
            raise self.error


class Writer(FileSystemWriter):
    """Writes this rank's tensors and knows the checksums of its files.

    Stock writing loses an exception of any thread but the first, a full disk included, and syncs file by file.

    Args:
        path: The folder; new.
        threads: Files written at a time.
    """

    def __init__(self, path: Path, *, threads: int = THREADS) -> None:
        super().__init__(path, sync_files=False)
        self._folder = path
        self._threads = threads
        self._containers = Containers()
        self.entries: dict[str, dict[str, Any]] = {}

    def storage_meta(self) -> StorageMeta:
        """Empty: the stock one holds the path of the folder, which is about to be renamed."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, several files at a time.

        Raises:
            OSError: of the first file that could not be written.
        """
        prefix: str = plan.storage_data.prefix
        jobs = [(f"{prefix}{i}{DEFAULT_SUFFIX}", part) for i, part in enumerate(_parts(plan.items))]
        with ThreadPoolExecutor(self._threads) as pool:
            tasks = [pool.submit(self._file, name, part, planner) for name, part in jobs]
            try:
                results = [result for task in tasks for result in task.result()]
            finally:
                for task in tasks:
                    task.cancel()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        sink = files.Sink(self._folder / name, algorithm=files.FAST)
        try:
            for item in items:
                sink.write(bytes(-sink.tell() % ALIGNMENT))
                offset = sink.tell()
                self._tensor(_on_host(planner.resolve_data(item)), sink)
                length = sink.tell() - offset
                where = StorageInfo(name, offset, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
            self.entries[name] = sink.finish()
        finally:
            sink.close()
        return results

    def _tensor(self, tensor: Tensor, sink: files.Sink) -> None:
        around = self._containers.around(tensor.dtype, tensor.shape)
        if around is not None:
            for part in (around[0], raw(tensor), around[1]):
                sink.write(part)
            return
        stream = Stream(sink)
        with without_crc():
            stream.save(tensor)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index. Rank 0 only."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        self.entries[METADATA] = files.write_new(self._folder / METADATA, pickle.dumps(metadata))


def _parts(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """Items in their order, cut into files of about ``FILE_BYTES``."""
    parts: list[list[WriteItem]] = []
    room = 0
    for item in items:
        assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
        size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if not parts or size > room:
            parts.append([])
            room = FILE_BYTES
        parts[-1].append(item)
        room -= size
    return parts


def _on_host(data: Any) -> Tensor:
    tensor: Tensor = data.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # torch.save writes the whole storage that a view looks into
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    process_group: distributed.ProcessGroup | None = None,
    threads: int = THREADS,
) -> dict[str, dict[str, Any]]:
    """Write named tensors; gives this rank's manifest entries by file name.

    Args:
        folder: Exists; holds nothing yet.
        tensors: By global name: plain ones, written once, or DTensors, each rank its part.
        process_group: Of gloo, whose every rank must call this; None for one process.
        threads: Files written at a time by each rank.

    Raises:
        OSError: in one process, what the file system says.
        torch.distributed.checkpoint.api.CheckpointException: on every rank, when any of them failed.
    """
    state: dict[str, Any] = dict(tensors)
    writer = Writer(folder, threads=threads)
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    if process_group is not None:
        save(state, storage_writer=writer, planner=planner, process_group=process_group)
        return writer.entries
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return writer.entries
