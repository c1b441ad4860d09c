"""What a user gets from the wheel is what stands in the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

LINKS = ("callbacks", "strategies", "conf")


def test_the_wheel_holds_every_file_once(wheel_contents, expected_contents):
    assert wheel_contents == expected_contents


def test_the_wheel_is_typed_and_mapped(wheel_contents):
    assert "lit_pretrain/py.typed" in wheel_contents
    for name in LINKS:
        assert f"lit_pretrain/{name}/__init__.py" in wheel_contents
    assert {name.partition("/")[0] for name in wheel_contents} == {"lit_pretrain"}  # no generic name in site-packages


def test_the_wheel_carries_the_license_and_the_script(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (scripts,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "lit-pretrain = lit_pretrain.cli:main" in archive.read(scripts).decode()
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_links_that_git_wrote_as_text_change_nothing(repository, tools, tmp_path, wheel_contents):
    """With ``git config core.symlinks false`` (Windows) a link is checked out as a file that holds its target."""
    copy_sources, build, contents = tools
    tree = copy_sources(repository, tmp_path / "source")
    for name in LINKS:
        link = tree / "lit_pretrain" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    assert contents(build(tree, "wheel", tmp_path / "dist")) == wheel_contents


def test_the_sdist_builds_the_same_wheel(tree, tools, tmp_path, wheel_contents):
    _, build, contents = tools
    sdist = build(tree, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert contents(build(unpacked, "wheel", tmp_path / "dist")) == wheel_contents


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel, installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, timeout=120)
    return folder


def test_the_console_script_runs_outside_the_repository(site, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [str(site / "bin" / "lit-pretrain"), "--help"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert "generate" in done.stdout


def test_the_installed_configuration_is_found(site, tmp_path):
    program = (
        "import importlib.resources as r, lit_pretrain.conf as c;"
        "print(c.__file__); print(*sorted(p.name for p in r.files(c).iterdir()))"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    file, names = done.stdout.splitlines()
    assert Path(file).is_relative_to(site)
    assert "train.yaml" in names.split()
