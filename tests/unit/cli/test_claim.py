"""A run folder is one run's alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lit_pretrain.cli.claim import claimed
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


def test_checkpoints_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with claimed(tmp_path):
        pass
    (tmp_path / "checkpoints" / "step-00000006.ckpt").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"step-00000006\.ckpt.*another run_id="), claimed(tmp_path):
        pass


def test_curves_that_will_mix_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.x").touch()
    with claimed(tmp_path):
        pass
    assert "holds curves of an earlier run" in capsys.readouterr().err
