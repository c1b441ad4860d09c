"""A skip ledger on disk: JSON lines, each on the disk before the run goes on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lit_pretrain.errors import DataError
from lit_pretrain.spikes.ledger import Skip, SkipLedger


class LedgerFile:
    """Reads and appends; one process of a run writes.

    A line that a kill or a power cut left unfinished is as if it had never been begun: the run did not go on from it.
    It is ignored by ``read`` and removed by ``append``.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def read(self) -> SkipLedger:
        """Every complete entry; empty lines are passed over.

        Raises:
            DataError: A complete line is none of ours or comes twice, or the file cannot be read.
        """
        lines, _ = self._lines()
        entries: dict[str, Skip] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = Skip.from_json(line.decode(errors="replace"))
            except DataError as error:
                raise DataError(f"{self.path}, line {number}: {error} Repair or remove the line.") from error
            if entry.to_json() in entries:
                raise DataError(
                    f"{self.path}, line {number} repeats an entry above it, and a run leaves no data out twice; remove "
                    "the line."
                )
            entries[entry.to_json()] = entry
        return SkipLedger(list(entries.values()))

    def check_writable(self) -> None:
        """Try it, since a file system may answer otherwise than it acts; nothing is left behind.

        Raises:
            DataError: An entry could not be written.
        """
        problem = None
        try:
            place = next(folder for folder in self.path.absolute().parents if os.path.lexists(folder))
            if self.path.is_file():
                with self.path.open("r+b"):
                    pass
            elif self.path.is_dir():
                problem = "it is a folder"
            elif self.path.exists():  # a device or a pipe
                problem = "it is no regular file"
            elif not place.is_dir():
                problem = f"{place} is no folder"
            else:
                with tempfile.TemporaryFile(dir=place) as trial:
                    trial.write(b"\n")
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is not None:
            raise DataError(
                f"The skip ledger {self.path} could not be written ({problem}); set rollback.ledger or the trainer's "
                "default_root_dir to a place that can."
            )

    def append(self, entry: Skip) -> None:
        """Add an entry; returns when it is on the disk.

        Raises:
            DataError: The file cannot be written.
        """
        data = entry.to_json().encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _, whole_bytes = self._lines()
            # Not append mode: what a kill left unfinished has to go first.
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                os.ftruncate(handle, whole_bytes)
                os.lseek(handle, whole_bytes, os.SEEK_SET)
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the file's name, where it is new
            finally:
                os.close(folder)
        except OSError as error:
            raise DataError(f"Could not write the skip ledger {self.path}: {error.strerror or error}.") from error

    def _lines(self) -> tuple[list[bytes], int]:
        """The complete lines, and how many bytes they take."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise DataError(f"Could not read the skip ledger {self.path}: {error.strerror or error}.") from error
        lines = data.split(b"\n")
        lines.pop()  # empty, or without its end
        # A power cut can keep a file's length and lose its bytes.
        if lines and b"\0" in lines[-1]:
            lines.pop()
        return lines, sum(len(line) + 1 for line in lines)
