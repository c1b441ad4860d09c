"""The mapped folders, their links and their guards; the lists in pyproject.toml against the tree."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LINKS = ("callbacks", "strategies", "conf")


@pytest.fixture(scope="module")
def project(repository) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def constraints(repository) -> list[str]:
    lines = (repository / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def requirements(project) -> list[Requirement]:
    extras = project["project"]["optional-dependencies"].values()
    return [Requirement(line) for lines in (project["project"]["dependencies"], *extras) for line in lines]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_to_its_sibling(repository, name):
    link = repository / "lit_pretrain" / name
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (repository / name).resolve()


@pytest.mark.parametrize("name", LINKS)
def test_a_mapped_folder_has_one_identity(repository, monkeypatch, name):
    """Imported under its bare name it would define every class a second time."""
    monkeypatch.syspath_prepend(str(repository))
    with pytest.raises(ImportError, match=rf"import it as lit_pretrain\.{name}"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_pyproject_lists_every_package(repository, project):
    """A new room that is not listed would be missing from the wheel."""
    found = set()
    mapping = {f"lit_pretrain.{name}": repository / name for name in LINKS}
    for root, top in [("lit_pretrain", repository / "lit_pretrain"), *mapping.items()]:
        for folder, subfolders, files in os.walk(top, followlinks=False):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            if any(file.endswith(".py") for file in files):
                found.add(".".join([root, *Path(folder).relative_to(top).parts]))
                assert "__init__.py" in files, f"{folder} has modules but no __init__.py"
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_every_constraint_is_one_exact_version(constraints):
    pattern = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*")
    assert [line for line in constraints if not pattern.fullmatch(line)] == []
    names = [line.partition("==")[0] for line in constraints]
    assert names == sorted(set(names))


def test_constraints_pin_every_requirement_within_its_range(constraints, requirements):
    pins = dict(line.split("==") for line in constraints)
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned"
        assert pins[name] in requirement.specifier, f"{requirement} does not allow {pins[name]}"


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_the_malicious_lightning_releases_are_excluded(requirements, constraints, version):
    (lightning,) = [requirement for requirement in requirements if requirement.name == "lightning"]
    assert version not in lightning.specifier
    assert "2.6.4" in lightning.specifier
    assert f"pytorch-lightning=={version}" not in constraints


def test_torch_is_pinned_without_a_build_tag(constraints):
    """The plain version is met by a CPU wheel and by a CUDA wheel alike."""
    assert [line for line in constraints if line.startswith("torch==")] == ["torch==2.13.0"]
