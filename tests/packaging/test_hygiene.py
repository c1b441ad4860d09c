"""The state of the repository itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MAX_LINES = 400
MAX_BYTES = 2**20
# Written so that this file does not match its own patterns.
MACHINE_PATHS = re.compile("/(?:" + "|".join(("work", "root", "farm")) + ")/")
PROMISES = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


@pytest.fixture(scope="module")
def tracked(repository) -> dict[str, str]:
    """Path to git's file mode, for every committed file that is still there."""
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-s", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    entries = (entry.split("\t", 1) for entry in listing.split("\0") if entry)
    return {path: meta.split()[0] for meta, path in entries if os.path.lexists(repository / path)}


@pytest.fixture(scope="module")
def texts(repository, tracked) -> dict[str, str]:
    paths = [path for path, mode in tracked.items() if mode != "120000"]
    return {path: (repository / path).read_text(errors="replace") for path in paths}


def test_no_path_of_one_machine(texts):
    found = {path: MACHINE_PATHS.findall(text) for path, text in texts.items()}
    assert {path: hits for path, hits in found.items() if hits} == {}


def test_no_promises(texts):
    assert [path for path, text in texts.items() if PROMISES.search(text)] == []


def test_no_file_has_two_reasons_to_change(texts):
    """A module of this length has a seam somewhere."""
    lengths = {path: text.count("\n") for path, text in texts.items() if path.endswith(".py")}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_large_file(repository, tracked):
    sizes = {path: os.lstat(repository / path).st_size for path in tracked}
    assert {path: size for path, size in sizes.items() if size > MAX_BYTES} == {}


def test_links_are_relative_and_lead_inside(repository, tracked):
    links = [path for path, mode in tracked.items() if mode == "120000"]
    assert links
    for path in links:
        assert not Path(os.readlink(repository / path)).is_absolute(), path
        assert (repository / path).resolve(strict=True).is_relative_to(repository.resolve()), path


def test_scripts_are_executable(tracked):
    assert tracked[".ci/run"] == "100755"
