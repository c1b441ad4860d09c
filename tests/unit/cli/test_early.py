"""The worker that is started before Hydra; a stand-in takes its place, as the real one takes seconds to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_pretrain.cli import early, launch, ranks, runstate

STAND_IN = """
import json, os, socket, sys
from pathlib import Path
from lit_pretrain.cli import early, worker

def serve(run_dir, spec):
    seen = {"run_dir": str(run_dir), "spec": spec, "pid": os.getpid(), "group": os.getpgrp(),
            "open": [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")],
            "env": dict(os.environ)}
    (run_dir / "seen.json").write_text(json.dumps(seen))
    (run_dir / "result.json").write_text("{}")
    if (run_dir / "wait").exists():
        assert sys.stdin.buffer.read() == b""
        (run_dir / "alone").touch()
    return 0

sys.modules["lit_pretrain.instantiate.job"] = sys
sys.modules["lit_pretrain.instantiate.quiet"] = type(sys)("quiet")
sys.modules["lit_pretrain.instantiate.quiet"].quiet = lambda: None
import lit_pretrain.instantiate
worker.serve = serve
worker.leave(early.main())
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in_early.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(early, "MODULE", "stand_in_early")
    monkeypatch.setattr(ranks, "usable_cores", lambda: 2)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def seen(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "seen.json").read_text())


def waiting_pid() -> int:
    worker = early.WAITING.get()
    assert worker is not None
    assert worker._process is not None
    return worker._process.pid


def is_gone(pid: int) -> bool:
    end = time.monotonic() + 30
    while ranks.is_alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_it_becomes_the_rank_of_a_run_of_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        with early.started("train", ["seed=1"]):
            pid = waiting_pid()
            monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
            launch.run(run_dir, 1, keep_open=[handle])
    finally:
        os.close(handle)
    found = seen(run_dir)
    assert (found["pid"], found["group"], found["run_dir"]) == (pid, pid, str(run_dir))
    assert found["spec"] == {"sys_path": sys.path, "listen_fd": None}
    assert str(run_dir) in found["open"]
    env = found["env"]
    assert (env["RANK"], env["WORLD_SIZE"], env["HYDRA_FULL_ERROR"]) == ("0", "1", "1")
    assert env["MASTER_PORT"] != "0"
    assert is_gone(pid)
    assert early.WAITING.get() is None


@pytest.mark.parametrize("change", ["threads", "folder", "dead"])
def test_a_worker_that_does_not_fit_is_replaced(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    usual = "import sys; from pathlib import Path; Path(sys.argv[1], 'result.json').write_text('{}')"
    (tmp_path / "stand_in_worker.py").write_text(usual)
    monkeypatch.setattr(launch, "WORKER", "stand_in_worker")
    with early.started("train", []):
        pid = waiting_pid()
        if change == "threads":
            monkeypatch.setenv("OMP_NUM_THREADS", "7")
        elif change == "folder":
            monkeypatch.chdir(tmp_path)
        else:
            os.kill(pid, 9)
            assert is_gone(pid)
        launch.run(run_dir, 1)
    assert not (run_dir / "seen.json").exists()
    assert is_gone(pid)


def test_it_ends_with_a_command_that_fails_or_dies(run_dir: Path, tmp_path: Path) -> None:
    def fail() -> None:
        with early.started("train", []):
            pids.append(waiting_pid())
            raise RuntimeError

    pids: list[int] = []
    with pytest.raises(RuntimeError):
        fail()
    assert is_gone(pids[0])
    code = (
        "import time\nfrom lit_pretrain.cli import early\nearly.MODULE = 'stand_in_early'\n"
        "e = early.Early()\nprint(e._process.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        command.kill()
    assert is_gone(pid)


def test_the_rank_hears_of_the_commands_end_and_is_seen_by_inspect(run_dir: Path) -> None:
    (run_dir / "wait").touch()
    handle = os.open(run_dir, os.O_RDONLY)
    worker = early.Early()
    try:
        process = worker.take(run_dir, ranks.environment(0, 1, 1234), spec={}, handles=[handle])
        assert process is not None
        while not (run_dir / "result.json").exists():
            time.sleep(0.02)
        assert runstate.living_ranks(run_dir) == 1
        assert runstate.living_ranks(run_dir.parent) == 0
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
        assert (run_dir / "alone").exists()
    finally:
        os.close(handle)
        worker.end()


@pytest.mark.parametrize(
    ("verb", "words", "wanted"),
    [
        ("train", ["experiment=demo", "--config-dir", "conf", "-cd=conf"], True),
        ("generate", ["run=x"], False),
        ("train", ["-m", "seed=1,2"], False),
        ("train", ["--cfg", "job"], False),
        ("train", ["--help"], False),
        ("train", ["strategy=ddp"], False),
        ("train", ["trainer.devices=2"], False),
        ("train", ["run.inline=true"], False),
    ],
)
def test_when_it_is_started(run_dir: Path, verb: str, words: list[str], wanted: bool) -> None:
    with early.started(verb, words):
        assert (early.WAITING.get() is not None) == wanted


def test_not_on_one_core_nor_under_torchrun(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 1)
    with early.started("train", []):
        assert early.WAITING.get() is None
    monkeypatch.setattr(ranks, "usable_cores", lambda: 2)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with early.started("train", []):
        assert early.WAITING.get() is None
