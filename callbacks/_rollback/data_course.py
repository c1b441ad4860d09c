"""Which data a run reads, leaves out, and goes on with; the ledger of it on disk."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._everywhere import everywhere
from lit_pretrain.errors import DataError
from lit_pretrain.spikes import LedgerFile, Skip, SkipLedger


class DataCourse:
    """Positions count updates' worth of data, whether they were trained on or left out, over the whole run.

    Args:
        path: Of the ledger; None is ``spikes.jsonl`` in the trainer's ``default_root_dir``.

    Attributes:
        ledger: What was left out.
        position: Data read; never goes back.
        jumped_from: The position before the jump that led to this window; None where there was none.
        is_open: In a window that is trained on.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: LedgerFile | None = None
        self.forget()

    def forget(self) -> None:
        """Be as new."""
        self.ledger = SkipLedger()
        self.position = 0
        self.jumped_from: int | None = None
        self.is_open = False
        self._is_leaving_out = False  # in a window that is not trained on

    def start(self, trainer: Trainer, *, is_resumed: bool) -> None:
        """Read the ledger's file. Every rank calls it when training starts.

        Args:
            trainer: In ``on_train_start``.
            is_resumed: This object's own state was restored.

        Raises:
            DataError: The file is damaged, tells of another run or cannot be written; on every rank.
        """
        is_fresh = trainer.global_step == 0 and not is_resumed
        if not is_resumed:
            self.position = loops.place(trainer).batches[0] // trainer.accumulate_grad_batches
        folder = Path(str(trainer.strategy.broadcast(str(Path(trainer.default_root_dir).expanduser().absolute()))))
        self._file = LedgerFile(self._path if self._path is not None else folder / "spikes.jsonl")
        lines = everywhere(trainer, lambda: self._read(trainer, is_fresh=is_fresh))
        on_disk = SkipLedger.from_state(trainer.strategy.broadcast(lines))
        ahead = max(0, len(on_disk) - len(self.ledger))
        self.ledger = on_disk.reconciled(self.ledger)
        everywhere(trainer, lambda: self._append(trainer, *self.ledger.entries[len(on_disk) :]))
        if ahead:
            rank_zero_info(f"The ledger {self._file.path} holds {ahead} jumps over bad data that are made again.")

    def _read(self, trainer: Trainer, *, is_fresh: bool) -> list[str]:
        if not trainer.is_global_zero or self._file is None:
            return []
        if is_fresh:
            _set_aside(self._file.path)
        self._file.check_writable()
        return self._file.read().state_dict()

    def _append(self, trainer: Trainer, *entries: Skip) -> None:
        if trainer.is_global_zero and self._file is not None:
            for entry in entries:
                self._file.append(entry)

    def enter(self, trainer: Trainer, entry: Skip) -> None:
        """Add an entry; on the disk before the run goes on. Every rank calls it.

        Raises:
            DataError: The file cannot be written; on every rank.
        """
        everywhere(trainer, lambda: self._append(trainer, entry))
        self.ledger = self.ledger.added(entry)

    @property
    def has_to_jump(self) -> bool:
        """Whether the next window is left out."""
        return self.ledger.next_position(self.position) > self.position

    def leaves_out(self) -> bool:
        """Whether the next microbatch is."""
        return not self.is_open and (self._is_leaving_out or self.has_to_jump)

    def left_out(self, *, window_goes_on: bool) -> None:
        """A microbatch was left out."""
        if self.jumped_from is None:
            self.jumped_from = self.position
        self._is_leaving_out = window_goes_on
        self.position += not window_goes_on

    def end_window(self) -> None:
        """A window was trained on."""
        self.is_open, self.jumped_from = False, None
        self.position += 1

    @property
    def start_of_window(self) -> int:
        """The position at which a run stands that is about to train on this window, jump included."""
        return self.position if self.jumped_from is None else self.jumped_from

    def jump_at(self, updates: int) -> Skip | None:
        """The entry that led to this window, if the jump was made again; its update is known by then."""
        for entry in reversed(self.ledger.entries):
            if entry.step == updates and entry.low == self.jumped_from:
                return entry
        return None


def _set_aside(path: Path) -> None:
    """Keep the ledger of an earlier run in the same folder under another name: this run begins."""
    number = 1
    while path.is_file():
        other = path.with_name(f"{path.stem}-before-{number}{path.suffix}")
        if not other.exists():
            try:
                path.rename(other)
            except OSError as error:
                raise DataError(
                    f"The skip ledger {path} of an earlier run could not be renamed ({error.strerror or error}); move "
                    "it away, or set rollback.ledger to another file."
                ) from error
        number += 1
