"""A run folder is one run's alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lit_pretrain.cli.claim import claimed, earlier_curves
from lit_pretrain.errors import ConfigError

HOLD = "import sys; from pathlib import Path; from lit_pretrain.cli.claim import claimed\n"
HOLD += "with claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"


def test_another_process_trains_there(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is training in"), claimed(tmp_path):
            pass
    finally:
        other.kill()  # the lock must go with the process, whatever happened to it
        other.communicate()
    with claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_ranks_have_it_for_as_long_as_they_live(tmp_path: Path) -> None:
    """The command was killed; a rank that inherited the descriptor still saves."""
    with claimed(tmp_path) as handle:
        rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[handle])
    try:
        with pytest.raises(ConfigError, match="or saves there before it ends"), claimed(tmp_path):
            pass
    finally:
        rank.communicate()
    with claimed(tmp_path):
        pass


def test_curves_that_will_mix_are_announced(tmp_path: Path) -> None:
    assert earlier_curves(tmp_path) == ""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.x").touch()
    assert earlier_curves(tmp_path) == f"{tmp_path} holds curves of an earlier run; TensorBoard will draw both."
