"""The command with the toy of this folder: as a process in a user's folder, or in this process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.cli import main

PROGRAM = (str(Path(sys.executable).with_name("lit-pretrain")),)
TOY = Path(__file__).parent / "cli_toy"
CONF = TOY / "conf"
TRAIN = ["train", "--config-dir", str(CONF), "model=tiny"]
WORDS = ("--config-dir", "conf", "experiment=toy", "model=toy")
TWO_RANKS = ("trainer.devices=2", "strategy=ddp")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


def run_here(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line, in this process."""
    code = main(list(words))
    out, err = capfd.readouterr()
    return code, out, err


def workplace(folder: Path) -> Path:
    """A user's folder: own configuration and own classes, found without installing anything."""
    shutil.copytree(TOY, folder, dirs_exist_ok=True)
    return folder


def start(
    work: Path, *words: str, program: Sequence[str] = PROGRAM, log: str = "out.txt", **env: str
) -> subprocess.Popen[bytes]:
    """``lit-pretrain train`` with the toy; what it prints goes to ``log``."""
    with open(work / log, "wb") as out:
        return subprocess.Popen(
            [*program, "train", *WORDS, *words],
            cwd=work,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )


def finish(work: Path, *words: str, timeout: float = 240, program: Sequence[str] = PROGRAM) -> tuple[int, str]:
    code = start(work, *words, program=program).wait(timeout)
    return code, output(work)


def output(work: Path, log: str = "out.txt") -> str:
    return (work / log).read_text()


def witnesses(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(run_dir.glob("witness-*.json"))]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
