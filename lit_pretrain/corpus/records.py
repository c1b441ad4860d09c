"""Bytes of a file, decompressed, and the records between separators in any part of it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import fsspec

from lit_pretrain.corpus._files import readable_errors
from lit_pretrain.errors import ConfigError

COMPRESSIONS = (".gz", ".zst")
_CHUNK = 2**20  # bytes read at once


def compression_of(path: str) -> str | None:
    """``.gz``, ``.zst`` or None, by the file's name."""
    return next((ending for ending in COMPRESSIONS if path.endswith(ending)), None)


class DamagedError(Exception):
    """A compressed file ends early or does not decompress."""


@contextmanager
def open_bytes(path: str) -> Iterator[Any]:
    """A file on any file system of fsspec, decompressed by its name's ending.

    Raises:
        ConfigError: When a package is missing.
        DataError: When it cannot be opened.
        DamagedError: While reading a compressed file that is truncated or damaged.
    """
    compression = compression_of(path)
    if compression == ".zst":
        zstandard()
    with readable_errors(path, doing="read"), fsspec.open(path, "rb") as raw:
        try:
            if compression == ".gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file
            elif compression == ".zst":
                yield io.BufferedReader(_Zstandard(raw), _CHUNK)
            else:
                yield raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedError(str(error)) from error


def zstandard() -> Any:
    """The ``zstandard`` package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import zstandard as package
    except ImportError as error:
        raise ConfigError(
            "reading .zst files needs the package zstandard; install it with pip install 'lit-pretrain[curate]', or "
            "recompress the files as .gz."
        ) from error
    return package


class _Zstandard(io.RawIOBase):
    """Decompresses all frames of a stream, and notices when the last one is cut off: the package's reader does not."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._left = b""  # compressed bytes that belong to the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._decompress():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self) -> bool:
        """One step; False at the end."""
        package = zstandard()
        data = self._left or self._raw.read(_CHUNK // 8)
        self._left = b""
        if not data:
            if self._frame is not None:
                raise EOFError("it ends in the middle")
            return False
        if self._frame is None:
            self._frame = package.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(data))
        except package.ZstdError as error:
            raise EOFError(str(error)) from error
        if self._frame.eof:
            self._left, self._frame = self._frame.unused_data, None
        return True


def check_separator(separator: bytes) -> None:
    r"""Refuse a separator that overlaps itself: where it begins would depend on where reading began.

    Raises:
        ConfigError: As ``abab``, but not ``\n\n``, whose runs are read from their beginning.
    """
    if not separator:
        raise ConfigError("separator is empty; give the text that stands between documents.")
    overlaps = any(separator.endswith(separator[:size]) for size in range(1, len(separator)))
    if overlaps and len(set(separator)) > 1:
        raise ConfigError(f"separator={separator.decode()!r} ends as it begins; use one that cannot overlap itself.")


def split_records(
    file: BinaryIO, *, separator: bytes, start: int = 0, end: int | None = None, limit: int
) -> Iterator[tuple[int, bytes | None]]:
    """The records whose first byte lies in a part of a file, so that parts side by side give each record once.

    Args:
        file: Seekable when ``start`` is above 0.
        separator: Ends a record; see ``check_separator``.
        start: First byte of the part.
        end: First byte after it; None is the end of the file.
        limit: Bytes of the longest record; what is longer is read over in flat memory.

    Yields:
        Offset in the file, and the record, or None for one beyond ``limit``.
    """
    offset = _find_start(file, separator, start)
    if start:
        file.seek(offset)
    pending, dropped = b"", 0  # the beginning of the next record; bytes of it that were let go
    while chunk := file.read(_CHUNK):
        *records, pending = (pending + chunk).split(separator)
        for record in records:
            if end is not None and offset >= end:
                return
            size = dropped + len(record)
            if offset >= start:
                yield offset, record if size <= limit else None
            offset, dropped = offset + size + len(separator), 0
        if len(pending) > limit + len(separator):
            kept = pending[len(pending) - len(separator) + 1 :]  # may hold the beginning of a separator
            dropped, pending = dropped + len(pending) - len(kept), kept
    size = dropped + len(pending)
    if size and offset >= start and (end is None or offset < end):
        yield offset, pending if size <= limit else None


def _find_start(file: BinaryIO, separator: bytes, start: int) -> int:
    """Where to begin reading, so that the first separator found ends at ``start`` or later, and is a true one."""
    position = max(0, start - len(separator))
    if len(separator) == 1 or len(set(separator)) > 1:
        return position
    while position:  # back to the beginning of a run
        low = max(0, position - 4096)
        file.seek(low)
        before = file.read(position - low)
        run = len(before) - len(before.rstrip(separator[:1]))
        position -= run
        if run < len(before):
            break
    return position
