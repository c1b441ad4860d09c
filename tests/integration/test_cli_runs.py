"""Whole runs through the console script: processes, signals, sweeps, outer launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAM = (str(Path(sys.executable).with_name("lit-pretrain")),)
TOY = Path(__file__).parent / "cli_toy"
WORDS = ("--config-dir", "conf", "experiment=toy", "model=toy")
TWO_RANKS = ("trainer.devices=2", "strategy=ddp")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A user's folder: own configuration and own classes, found without installing anything."""
    shutil.copytree(TOY, tmp_path, dirs_exist_ok=True)
    return tmp_path


def start(work: Path, *words: str, program: Sequence[str] = PROGRAM, **env: str) -> subprocess.Popen[bytes]:
    with open(work / "out.txt", "wb") as out:
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


def output(work: Path) -> str:
    return (work / "out.txt").read_text()


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


def test_one_process(work: Path) -> None:
    code, out = finish(work, "run_id=one", "callbacks.fail.step=99")
    assert code == 0, out
    run_dir = work / "outputs" / "one"
    (seen,) = witnesses(run_dir)
    assert (seen["rank"], seen["world"], seen["root"]) == (0, 1, str(run_dir))
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 3
    assert "finished in" in out
    assert "Traceback" not in out
    assert "litlogger" not in out  # advertisements
    assert (run_dir / "resolved.yaml").exists()
    kept = {p.name for p in (run_dir / ".hydra").iterdir()}
    assert kept == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    words = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text())
    assert words == [*WORDS[2:], "run_id=one", "callbacks.fail.step=99"]
    assert yaml.safe_load((run_dir / ".hydra" / "hydra.yaml").read_text())["hydra"]["job"]["name"] == "train"
    assert yaml.safe_load((run_dir / ".hydra" / "config.yaml").read_text())["run_id"] == "one"


def test_a_failing_run_shows_its_traceback_once(work: Path) -> None:
    code, out = finish(work, "run_id=one", "callbacks.fail.rank=0")
    assert code == 1, out
    assert out.count("RuntimeError: boom on rank 0") == 1
    assert "lit-pretrain: rank 0 of 1 failed:" in out
    assert "boom on rank 0" in json.loads((work / "outputs/one/failure.json").read_text())["text"]


@pytest.mark.slow
def test_two_jobs_of_two_ranks(work: Path) -> None:
    code, out = finish(work, "-m", "run_id=s", "optimizer.lr=1e-3,3e-4", "debug=fast", *TWO_RANKS)
    assert code == 0, out
    assert [p.name for p in (work / "outputs").iterdir()] == ["s"]
    ports = set()
    for job, lr in (("0", 1e-3), ("1", 3e-4)):
        a, b = witnesses(work / "outputs" / "s" / job)
        assert (a["lr"], b["lr"], a["world"], b["world"], a["rank"], b["rank"]) == (lr, lr, 2, 2, 0, 1)
        assert a["weight"] == b["weight"]
        assert a["pid"] != b["pid"]
        assert a["root"] == b["root"] == str(work / "outputs" / "s" / job)
        assert a["env"]["MASTER_PORT"] == b["env"]["MASTER_PORT"]
        ports.add(a["pid"])
    assert len(ports) == 2  # fresh processes for the second job


@pytest.mark.slow
def test_failed_jobs_are_reported_at_the_end_and_the_others_run(work: Path) -> None:
    code, out = finish(work, "-m", "run_id=s", "callbacks.fail.rank=1,-1,0", *TWO_RANKS)
    assert code == 1, out
    assert "boom on rank 1" in out
    assert "boom on rank 0" in out
    assert out.rstrip().endswith("2 of 3 jobs failed: 0, 2")
    assert (work / "outputs/s/1/result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_its_peer_ends(work: Path, rank: int) -> None:
    code, out = finish(work, "run_id=s", f"callbacks.fail.rank={rank}", "callbacks.fail.how=kill", *TWO_RANKS)
    assert code == 1, out
    assert f"rank {rank} of 2 was killed by SIGKILL" in out
    assert not any(alive(w["pid"]) for w in witnesses(work / "outputs" / "s"))


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_every_rank_and_the_sweep(work: Path, signum: int, code: int) -> None:
    slow = ("-m", "run_id=s", "seed=1,2", "length.steps=10000", "callbacks.fail.how=slow")
    process = start(work, *slow, *TWO_RANKS)
    first = work / "outputs" / "s" / "0"
    assert wait_for(lambda: len(list(first.glob("witness-*.json"))) == 2), output(work)
    time.sleep(0.5)
    pids = [w["pid"] for w in witnesses(first)]
    process.send_signal(signum)
    assert process.wait(60) == code, output(work)
    assert wait_for(lambda: not any(map(alive, pids)), 60)
    assert not (work / "outputs" / "s" / "1").exists()
    assert "Traceback" not in output(work)


@pytest.mark.slow
def test_two_sweeps_at_once_do_not_meet(work: Path) -> None:
    sweeps = [start(work, "-m", "seed=1,2", "debug=fast") for _ in range(2)]
    assert [p.wait(240) for p in sweeps] == [0, 0], output(work)
    folders = list((work / "outputs").iterdir())
    assert len(folders) == 2
    assert all(len(witnesses(f / job)) == 1 for f in folders for job in "01")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--standalone", "static"])
def test_ranks_of_torchrun_agree_on_the_folder(work: Path, how: str) -> None:
    how = how if how == "--standalone" else f"--master-port={free_port()}"
    code, out = finish(work, *TWO_RANKS, program=(*TORCHRUN, how, "--no-python", *PROGRAM))
    assert code == 0, out
    (folder,) = (work / "outputs").iterdir()
    assert len(witnesses(folder)) == 2
    assert (folder / "resolved.yaml").exists()


@pytest.mark.slow
def test_a_sweep_under_torchrun_is_refused(work: Path) -> None:
    program = (*TORCHRUN, "--standalone", "--no-python", *PROGRAM)
    code, out = finish(work, "-m", "run_id=s", "seed=1,2", *TWO_RANKS, program=program)
    assert code != 0
    assert "-m under torchrun would run the whole sweep in every rank" in out


@pytest.mark.slow
def test_ranks_of_srun_agree_on_the_folder(work: Path) -> None:
    """What srun sets, without Slurm."""
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "x",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [start(work, *TWO_RANKS, **common, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    assert [p.wait(240) for p in ranks] == [0, 0], output(work)
    assert [p.name for p in (work / "outputs").iterdir()] == ["slurm-77.0"]
    assert len(witnesses(work / "outputs" / "slurm-77.0")) == 2


@pytest.mark.slow
def test_joblib_launcher(work: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ("-m", "run_id=s", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "callbacks.fail.rank=-1,0")
    code, out = finish(work, *words, "debug=fast")
    assert code == 1, out
    assert "boom on rank 0" in out
    assert "1 of 2 jobs failed: 1" in out
    assert (work / "outputs/s/0/result.json").exists()
