"""Text that every Python installation already holds: the standard library's code and packages' docstrings."""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tests repeat themselves; charmap tables and the topics of pydoc are data in the clothes of code.
_NOT_CODE = frozenset(
    {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)
_NOT_PROSE = frozenset({"__pycache__", "test", "tests", "testing", "lit_pretrain"})
_LARGEST_FILE = 400_000  # bytes; larger ones are generated tables
_FEWEST_WORDS = 20
_LEAST_PROSE = 0.6
# Parsing costs most of the time: files with little documentation are not worth it.
_LEAST_QUOTED = 0.25
_TRIPLE_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)


@dataclass(frozen=True)
class SourceFile:
    """A file that a domain may read.

    Args:
        name: Path below its root, with ``/``; decides the order.
        path: Where it lies.
        size: Bytes.
    """

    name: str
    path: Path
    size: int


def list_code(root: Path | None = None) -> list[SourceFile]:
    """The standard library's modules, in order of their names."""
    roots = [root if root is not None else Path(sysconfig.get_path("stdlib"))]
    files = _list_python(roots, leave_out=_NOT_CODE)
    return [file for file in files if not file.name.startswith("_sysconfigdata")]


def list_prose(roots: list[Path] | None = None) -> list[SourceFile]:
    """Modules of installed packages, in an order of their own that mixes the packages.

    A limit on the bytes read then takes something of every package rather than all of the first few.
    """
    if roots is None:
        roots = [Path(path) for path in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    files = _list_python(roots, leave_out=_NOT_PROSE)
    return sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())


def read_code(file: SourceFile) -> list[str]:
    """The file as one document; none when it is not UTF-8 or blank."""
    text = _read(file)
    return [text] if text is not None and text.strip() else []


def read_prose(file: SourceFile) -> list[str]:
    """The file's docstrings that read like English, one document each; the file is parsed, never imported."""
    text = _read(file)
    if text is None or sum(map(len, _TRIPLE_QUOTED.findall(text))) < _LEAST_QUOTED * len(text):
        return []
    try:
        with warnings.catch_warnings(), _without_garbage_collection():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [cleaned for raw in _docstrings(tree.body) if is_prose(cleaned := inspect.cleandoc(raw))]


@dataclass(frozen=True)
class Domain:
    """One kind of text.

    Args:
        title: For people.
        list_files: Gives the files in reading order.
        read: Gives a file's documents.
        max_bytes: UTF-8 bytes of text after which reading stops; None reads everything.
    """

    title: str
    list_files: Callable[[], list[SourceFile]]
    read: Callable[[SourceFile], list[str]]
    max_bytes: int | None


def known_domains() -> dict[str, Domain]:
    """The domains by name."""
    return {
        "code": Domain("standard library", list_code, read_code, None),
        # Enough for a demo, and parsed in less than 10 seconds on one core.
        "english": Domain("docstrings of installed packages", list_prose, read_prose, 6_000_000),
    }


def is_prose(text: str) -> bool:
    """Whether most of the whitespace-delimited words are plain words, and there are enough of them."""
    words = text.split()
    if len(words) < _FEWEST_WORDS or ">>>" in text:
        return False
    plain = sum(word.strip(".,;:!?()'\"`*").replace("-", "").isalpha() for word in words)
    return plain >= _LEAST_PROSE * len(words)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A syntax tree is many objects without cycles: searching them for cycles takes as long as parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _docstrings(body: list[ast.stmt]) -> Iterator[str]:
    """Docstrings of a module's, class's or function's body and of the definitions in it, in their order."""
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        value: Any = body[0].value.value
        if isinstance(value, str):
            yield value
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(node.body)


def _read(file: SourceFile) -> str | None:
    try:
        text = file.path.read_text(encoding="utf-8")
        text.encode()  # lone surrogates
    except (OSError, UnicodeError):
        return None
    return text


def _list_python(roots: list[Path], *, leave_out: frozenset[str]) -> list[SourceFile]:
    files = []
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in leave_out)
            for name in sorted(names):
                path = Path(folder, name)
                if name.endswith(".py") and (size := _size(path)) <= _LARGEST_FILE:
                    files.append(SourceFile(path.relative_to(root).as_posix(), path, size))
    return sorted(files, key=lambda file: file.name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a dangling link
        return _LARGEST_FILE + 1
