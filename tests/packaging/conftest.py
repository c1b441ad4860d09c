"""One wheel per session, built from a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = ("lit_pretrain", "callbacks", "strategies", "conf", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
LINKS = ("callbacks", "strategies", "conf")


def copy_sources(root: Path, target: Path) -> Path:
    """What a build needs, links kept as links."""
    target.mkdir()
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy2(root / name, target / name)
    return target


def build(tree: Path, kind: str, out: Path) -> Path:
    """Build ``kind`` (wheel or sdist) with this environment's setuptools, as a build front end would."""
    program = "import sys; from setuptools import build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"
    out.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", program, kind, str(out)], cwd=tree, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (product,) = out.iterdir()
    return product


def contents(wheel: Path) -> list[str]:
    """Every file in a wheel but its own metadata, as often as it is there."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="session")
def tree(repository, tmp_path_factory) -> Path:
    return copy_sources(repository, tmp_path_factory.mktemp("tree") / "source")


@pytest.fixture(scope="session")
def wheel(tree, tmp_path_factory) -> Path:
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="session")
def wheel_contents(wheel) -> list[str]:
    return contents(wheel)


@pytest.fixture(scope="session")
def expected_contents(tree) -> list[str]:
    """What stands in the package folders of the tree, by the name under which it must be installed."""

    def files(folder: Path, prefix: str, *, skip: tuple[str, ...] = ()) -> list[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
        return [f"{prefix}/{path.as_posix()}" for path in found if path.parts[0] not in skip]

    names = files(tree / "lit_pretrain", "lit_pretrain", skip=LINKS)
    for name in LINKS:
        names += files(tree / name, f"lit_pretrain/{name}")
    return sorted(names)


@pytest.fixture(scope="session")
def tools() -> tuple[Callable[..., Path], Callable[..., Path], Callable[..., list[str]]]:
    return copy_sources, build, contents
