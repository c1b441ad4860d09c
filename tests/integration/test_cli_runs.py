"""Whole runs through the console script: processes, signals, sweeps, outer launchers."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.integration.cli_processes import (
    PROGRAM,
    TORCHRUN,
    TWO_RANKS,
    WORDS,
    alive,
    finish,
    free_port,
    output,
    start,
    wait_for,
    witnesses,
    workplace,
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return workplace(tmp_path)


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
        assert a["env"]["PL_GLOBAL_SEED"] == b["env"]["PL_GLOBAL_SEED"] == "1"
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
    sweeps = [start(work, "-m", "seed=1,2", "debug=fast", *TWO_RANKS, log=f"{i}.txt") for i in range(2)]
    assert [p.wait(240) for p in sweeps] == [0, 0], output(work, "0.txt") + output(work, "1.txt")
    folders = list((work / "outputs").iterdir())
    assert len(folders) == 2
    seen = [witnesses(folder / job) for folder in folders for job in "01"]
    assert [len(job) for job in seen] == [2, 2, 2, 2]
    assert len({w["pid"] for job in seen for w in job}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--standalone", "static", "-m"])
def test_ranks_of_torchrun_agree_on_the_folder(work: Path, how: str) -> None:
    where = f"--master-port={free_port()}" if how == "static" else "--standalone"
    what = ("-m", "lit_pretrain.cli") if how == "-m" else ("--no-python", *PROGRAM)
    code, out = finish(work, *TWO_RANKS, program=(*TORCHRUN, where, *what))
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


def srun() -> dict[str, str]:
    """What srun sets, without Slurm."""
    return {
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


@pytest.mark.slow
def test_ranks_of_srun_agree_on_the_folder(work: Path) -> None:
    common = srun()
    ranks = [start(work, *TWO_RANKS, **common, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    assert [p.wait(240) for p in ranks] == [0, 0], output(work)
    assert [p.name for p in (work / "outputs").iterdir()] == ["slurm-77.0"]
    assert len(witnesses(work / "outputs" / "slurm-77.0")) == 2


OTHER_RATE = "rank 1 was started with other settings: optimizer.lr is 0.2 there and 0.1 on rank 0"


@pytest.mark.slow
def test_ranks_of_torchrun_with_other_settings_are_refused(work: Path) -> None:
    other = ("bash", "-c", f'exec {PROGRAM[0]} "$@" optimizer.lr=0.$((RANK+1))', "x")
    code, out = finish(work, "run_id=s", *TWO_RANKS, program=(*TORCHRUN, "--standalone", "--no-python", *other))
    assert code != 0
    assert out.count(OTHER_RATE) == 2, out  # each rank says it
    assert "Traceback" not in out.split("torch/distributed/elastic")[0]
    assert not list(work.glob("outputs/s/witness*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimizer.lr=0.1", "optimizer.lr=0.2"], OTHER_RATE),
        (["length.steps=3", "length.steps=null"], "rank 1 has no configuration: "),
        (["seed=-1", "seed=-1"], "seed=-1 must be a whole number"),
    ],
)
def test_ranks_of_srun_are_refused_together(work: Path, words: list[str], sentence: str) -> None:
    common = srun()
    ranks = [
        start(work, *TWO_RANKS, words[r], log=f"out{r}.txt", **common, SLURM_PROCID=str(r), SLURM_LOCALID=str(r))
        for r in range(2)
    ]
    assert [p.wait(120) for p in ranks] == [1, 1]
    said = [(work / f"out{r}.txt").read_text() for r in range(2)]
    assert sentence in said[0]
    assert sentence in said[1] or (sentence.startswith("rank 1 has") and "no length of training is given" in said[1])
    assert all("Traceback" not in text for text in said)
    assert not list(work.glob("outputs/*/witness*"))


SAVING = (
    "callbacks=default",
    "~callbacks.sampler",
    "~callbacks.throughput",
    "~callbacks.progress",
    "validation.every_steps=5",
)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "ranks"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1)])
def test_a_preempted_run_says_how_to_go_on(work: Path, signum: int, ranks: int) -> None:
    many = TWO_RANKS if ranks == 2 else ()
    process = start(work, "run_id=p", "length.steps=25", "callbacks.fail.how=slow", *SAVING, *many)
    run_dir = work / "outputs" / "p"
    assert wait_for(lambda: len(list(run_dir.glob("witness-*.json"))) == ranks), output(work)
    time.sleep(0.5)
    process.send_signal(signum)
    assert process.wait(60) == 75, output(work)
    out = output(work)
    assert "Traceback" not in out
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["ended"], result["signal"]) == ("preempted", signal.Signals(signum).name)
    assert 0 < result["steps"] < 25
    said = f"saved {result['checkpoint']} at update {result['steps']} and stopped. Go on with:\n  lit-pretrain train "
    assert said in out
    command = out.rpartition("\n  lit-pretrain train ")[2].split("\n")[0]
    assert command.endswith("run_id=p resume=auto")
    assert not (run_dir / "errors").exists()
    seen = subprocess.run([*PROGRAM, "inspect", str(run_dir)], capture_output=True, text=True, check=True).stdout
    assert f"preempted at update {result['steps']} " in seen
    assert command.replace("--config-dir conf", f"--config-dir {work}/conf") in seen
    with open(work / "out.txt", "wb") as log:
        again = [*PROGRAM, "train", *shlex.split(command)]
        assert subprocess.run(again, cwd=work, stdout=log, stderr=log, check=False).returncode == 0, output(work)
    assert f"goes on from {result['checkpoint']}, update {result['steps']}." in output(work)
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 25
