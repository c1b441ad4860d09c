"""Checkpoint folders for Lightning's Trainer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.distributed import ProcessGroup

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.distributed.checkpoint.background import BackgroundWriter
from lit_pretrain.distributed.checkpoint.folder import read_checkpoint, read_rng, write_checkpoint
from lit_pretrain.distributed.checkpoint.manifest import THREADS, CheckpointError, read_manifest
from lit_pretrain.plugins.checkpoint_dict import join, split


class FolderCheckpointIO(CheckpointIO):
    """Saves checkpoints as folders that are written whole or not at all, and checks what it loads.

    For one device and for strategies where rank 0 saves; our own let every rank save what it holds, and then nobody
    gathers the model. Pass it to any Trainer::

        Trainer(plugins=[FolderCheckpointIO()])

    Nothing is pickled and nothing that could run is read: what is neither a tensor nor plain data is refused when
    saving, by its place in the checkpoint.

    Args:
        background: Write in a thread: ``save_checkpoint`` returns once the state is copied, and an error is raised by
            the next call. ``teardown``, which the Trainer calls at the end, waits; with nothing left to train
            meanwhile, whatever is saved after it is written before ``save_checkpoint`` returns.
        threads: Files written or read at a time.
    """

    writes_folders: ClassVar[bool] = True
    """Whoever names checkpoints asks: no file ending is wanted."""

    def __init__(self, *, background: bool = True, threads: int = THREADS) -> None:
        self.background = background
        self._threads = threads
        self._writer = BackgroundWriter(threads=threads)
        self._group: ProcessGroup | None = None
        self._is_over = False

    def save_together(self, group: ProcessGroup) -> None:
        """From now on every rank of a group saves its part of each checkpoint, and calls everything.

        A part is the whole checkpoint dict with sharded tensors as DTensors, and with tensors on the meta device where
        another rank has the values. The tree, the random states and the facts are those of the first rank.

        Args:
            group: Of gloo, and for nothing else.
        """
        self.wait()
        self._group = group
        self._is_over = False
        self._writer = BackgroundWriter(process_group=group, threads=self._threads)

    def begin(self) -> None:
        """A training begins: saves go to the background again. ``RunCheckpoint`` calls it."""
        self._is_over = False

    def __getstate__(self) -> dict[str, Any]:
        """Launchers that spawn ranks pickle the Trainer; a thread cannot travel, so its save is waited for."""
        self.wait()
        return {"background": self.background, "threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.background, self._threads = state["background"], state["threads"]
        self._writer = BackgroundWriter(threads=self._threads)
        self._group = None
        self._is_over = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save Lightning's checkpoint dict as a folder.

        Args:
            checkpoint: Its key ``lit_pretrain`` gives the names of the optimizers' parameters, the facts for the
                manifest and the random states; without it, optimizer state is kept by position.
            path: The folder. One that stands there is replaced once the new one is whole.
            storage_options: Must be None.

        Raises:
            CheckpointError: It cannot be saved, or an earlier save in the background failed.
        """
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options={storage_options!r} means nothing to FolderCheckpointIO; leave it out."
            )
        parts = split(checkpoint)
        tensors = {name: tensor for name, tensor in parts.tensors.items() if not tensor.is_meta}
        if self.background and not self._is_over:
            self._writer.save(_local(path), tensors=tensors, tree=parts.tree, rng=parts.rng, facts=parts.facts)
            return
        write_checkpoint(
            _local(path),
            tensors=tensors,
            tree=parts.tree,
            rng=parts.rng,
            facts=parts.facts,
            process_group=self._group,
            threads=self._threads,
        )

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's checkpoint dict from a folder, or from a file that torch.save wrote.

        Every byte of a folder is checked. A file is read as tensors and plain data only.

        Args:
            path: Folder or file.
            map_location: A device to put tensors on; by default they stay on the host.
            weights_only: Must not be False: no pickle is trusted.

        Raises:
            CheckpointError: It is missing, damaged or not trusted.
        """
        self.wait()
        path = _local(path)
        if not path.is_dir():
            return _load_file(path, map_location, weights_only)
        facts, _ = read_manifest(path)
        tree, tensors = read_checkpoint(path, threads=self._threads)
        checkpoint = join(tree, tensors, read_rng(path), facts)
        return _moved(checkpoint, map_location) if isinstance(map_location, (str, torch.device)) else checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a folder (or file), once the save that runs has succeeded; when it fails, nothing is removed."""
        path = _local(path)
        self.after_save(lambda: files.remove_tree(path))

    def after_save(self, work: Callable[[], object]) -> None:
        """Do something that relies on the last checkpoint, such as removing older ones.

        At once when no save runs; otherwise in its thread, when it has succeeded. Not at all after a failed one, whose
        error is left to the next save.
        """
        self._writer.after(work)

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed and the error was not raised yet; of ranks that write."""
        return self._writer.failed

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed.
        """
        self._writer.wait()

    def teardown(self) -> None:
        """Wait for a save in the background and let go of its memory.

        Raises:
            CheckpointError: It failed.
        """
        self._is_over = True
        self._writer.close()


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise CheckpointError(f"{path} is not a local path; FolderCheckpointIO writes to local file systems only.")
    return Path(path)


def _load_file(path: Path, map_location: Any | None, weights_only: bool | None) -> dict[str, Any]:
    if weights_only is False:
        raise CheckpointError(
            f"weights_only=False would run what {path} says; load it elsewhere, if it is trusted, and save its "
            "tensors and plain data."
        )
    try:
        found = torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; name a checkpoint folder or file.") from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as e:
        reason = str(e).strip().split("\n")[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({reason}); choose another.") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a checkpoint; choose another.")
    return found


def _moved(value: Any, device: str | torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device)
        return value
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
