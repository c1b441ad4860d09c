"""Saving next to a training: the state is copied on call, everything else happens in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from lit_pretrain.distributed.checkpoint._compat import with_local
from lit_pretrain.distributed.checkpoint.folder import write_packed
from lit_pretrain.distributed.checkpoint.manifest import THREADS, CheckpointFacts
from lit_pretrain.distributed.checkpoint.packing import Packed, pack


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread.

    A call stalls for one copy of the state into host memory that is kept for the next one (pinned, for tensors of a
    GPU); the first call also pays for that memory. An error of the thread is raised by the next call of ``save`` or
    ``wait``, whichever comes first, and never lost.

    Args:
        process_group: Of gloo and used for nothing else, where several ranks write one checkpoint: each then makes the
            same calls. None for one process.
        threads: Files written at a time.
    """

    def __init__(self, *, process_group: distributed.ProcessGroup | None = None, threads: int = THREADS) -> None:
        self._group = process_group
        self._threads = threads
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._running = False
        self._afterwards: list[Callable[[], object]] = []

    @property
    def saving(self) -> Path | None:
        """The folder being written, if one is."""
        with self._lock:
            return self._folder if self._running else None

    @property
    def failed(self) -> bool:
        """Whether the last save failed and nobody was told; asks no thread to end."""
        with self._lock:
            return self._error is not None

    def save(
        self,
        folder: Path,
        *,
        tensors: Mapping[str, Tensor],
        tree: Any,
        rng: Sequence[Mapping[str, Any]] = (),
        facts: CheckpointFacts,
    ) -> None:
        """Copy the state and start to write it; first waits for an earlier save to end.

        Args:
            folder: As for ``write_checkpoint``, like all others. All of it may change once this returns.
            tensors: By global name.
            tree: Everything else.
            rng: Random states, one mapping for each rank.
            facts: For the manifest.

        Raises:
            CheckpointError: The earlier save failed, and this one was not started; or the tree cannot be saved.
        """
        self.wait()
        packed = pack(tensors=tensors, tree=tree, rng=rng, facts=facts)
        staged = Packed(tensors=self._copy(packed.tensors), tree=packed.tree, rng=packed.rng, facts=packed.facts)
        self._folder = Path(folder)
        self._running = True
        # Not a daemon: a program that comes to its end waits until its checkpoint is written.
        self._thread = threading.Thread(target=self._write, args=(self._folder, staged), name="checkpoint")
        try:
            self._thread.start()
        except BaseException:
            self._running, self._thread = False, None
            raise

    def after(self, work: Callable[[], object]) -> None:
        """Do something that relies on the last save: in its thread once it has succeeded, at once when none runs.

        After a failed save it is not done at all. The error is left to ``save`` and ``wait``, which every rank of a
        training calls, while whoever calls this is often one of them alone.
        """
        with self._lock:
            if self._running:
                self._afterwards.append(work)
                return
            if self._error is not None:
                return
        work()

    def _write(self, folder: Path, packed: Packed) -> None:
        try:
            write_packed(folder, packed, process_group=self._group, threads=self._threads)
            while (work := self._next()) is not None:
                work()
        except BaseException as e:
            with self._lock:
                self._error, self._running, self._afterwards = e, False, []

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._afterwards:
                return self._afterwards.pop(0)
            self._running = False
            return None

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept, self._buffers = self._buffers, {}
        out: dict[str, Tensor] = {}
        on_device = False
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            buffer = kept.pop(name, None)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            on_device = on_device or local.is_cuda
            buffer.copy_(local, non_blocking=local.is_cuda)
            self._buffers[name] = buffer
            out[name] = with_local(tensor, buffer) if isinstance(tensor, DTensor) else buffer
        if on_device:
            torch.cuda.current_stream().synchronize()  # the caller is about to change what is being copied
        return out

    def wait(self) -> None:
        """Wait for the save that runs, if one does.

        Raises:
            CheckpointError: It could not be written, or the one before could not; each is said once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, then let go of the host memory; it can be used again afterwards.

        Raises:
            CheckpointError: The last save failed.
        """
        try:
            self.wait()
        finally:
            self._buffers = {}
