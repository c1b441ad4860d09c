"""Files that are either whole or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lit_pretrain.errors import DataError


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def readable_errors(path: Path | str, *, doing: str) -> Iterator[None]:
    """Turn what the operating system says about ``path`` into one sentence for the user.

    Raises:
        DataError: In place of any ``OSError``.
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist, so it is impossible to {doing}; check the path.") from error
    except PermissionError as error:
        raise DataError(f"No permission to {doing} {path}; change its permissions or choose another folder.") from error
    except OSError as error:
        raise DataError(f"Could not {doing} {path}: {error.strerror or error}.") from error


class WholeFile:
    """A binary file that appears under its name only after ``commit``, with its SHA-256 at hand.

    Args:
        path: Final name. The temporary file lies in the same folder, so that the rename stays on one file system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._digest = hashlib.sha256()
        with readable_errors(path, doing="write"):
            self._file: BinaryIO = self._temporary.open("xb")

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        with readable_errors(self.path, doing="write"):
            self._file.write(data)
        self._digest.update(data)

    def commit(self) -> str:
        """Flush to disk and rename; gives the SHA-256 of the content in hexadecimal."""
        with readable_errors(self.path, doing="write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Forget the file; what stood under the final name is untouched."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> str:
    """Write ``data`` to ``path`` at once or not at all; gives the SHA-256 in hexadecimal."""
    file = WholeFile(path)
    try:
        file.write(data)
        return file.commit()
    except BaseException:
        file.discard()
        raise


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content in hexadecimal."""
    with readable_errors(path, doing="read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the operating system gives back when the process ends, however it ends."""
    with readable_errors(path, doing="write"):
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
