"""Processes of a run: a stand-in worker takes the place of the real one, which costs seconds to import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lit_pretrain.cli import failures, launch, ranks
from lit_pretrain.errors import ConfigError, Preempted, RankError

VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PL_GLOBAL_SEED")
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
spec = json.loads(sys.stdin.buffer.readline())
seen = {"rank": rank, "pid": os.getpid(), "group": os.getpgrp(), "spec": spec, "cwd": os.getcwd(),
        "env": {k: os.environ.get(k) for k in %r}}
if spec["listen_fd"] is not None:
    import socket
    seen["port"] = socket.socket(fileno=os.dup(spec["listen_fd"])).getsockname()[1]
(run_dir / f"seen{rank}.json").write_text(json.dumps(seen))
exec((run_dir / "do.py").read_text())
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in_worker.py").write_text(
        WORKER % (("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PL_GLOBAL_SEED"),)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "WORKER", "stand_in_worker")
    monkeypatch.setattr(launch, "SETTLE_S", 1.0)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def go(run_dir: Path, body: str, world_size: int = 2) -> dict[str, object]:
    done = "if rank == 0: (run_dir / 'result.json').write_text('{\"metrics\": {}}')"
    (run_dir / "do.py").write_text(body + "\n" + done)
    return launch.run(run_dir, world_size)


def seen(run_dir: Path, rank: int) -> dict[str, object]:
    return json.loads((run_dir / f"seen{rank}.json").read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


FAIL = (
    "def fail(text, **more):\n"
    "    d = dict(rank=rank, time=time.time(), message=text, traceback=text)\n"
    "    d |= dict(user_error=False, secondary=False) | more\n"
    "    (run_dir / 'errors').mkdir(exist_ok=True)\n"
    "    (run_dir / 'errors' / f'rank{rank}.json').write_text(json.dumps(d))\n"
    "    os._exit(1)\n"
)


def test_every_rank_gets_torchruns_words_and_nothing_of_ours(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")  # stale, from somebody else's job
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    assert go(run_dir, "") == {"metrics": {}}
    first, second = seen(run_dir, 0), seen(run_dir, 1)
    assert [r["env"]["LOCAL_RANK"] for r in (first, second)] == ["0", "1"]
    assert all(r["env"]["WORLD_SIZE"] == "2" and r["env"]["PL_GLOBAL_SEED"] is None for r in (first, second))
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"] == str(first["port"])
    assert second["spec"]["listen_fd"] is None
    assert first["group"] == first["pid"] != second["group"]  # a group each
    assert first["spec"]["sys_path"] == sys.path
    assert os.environ["LOCAL_RANK"] == "5"


def test_one_rank_needs_no_rendezvous(run_dir: Path) -> None:
    go(run_dir, "", world_size=1)
    assert seen(run_dir, 0)["spec"]["listen_fd"] is None


def test_others_log_to_files(run_dir: Path) -> None:
    go(run_dir, "print('hello from', rank)", world_size=3)
    assert [(run_dir / f"rank{r}.log").read_text() for r in (1, 2)] == ["hello from 1\n", "hello from 2\n"]
    assert not (run_dir / "rank0.log").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_is_reported_and_its_peer_ends(run_dir: Path, rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)rank {rank} of 2 failed:\nTraceback of mine"):
        go(run_dir, FAIL + f"if rank == {rank}: fail('Traceback of mine')\ntime.sleep(60)")
    assert time.monotonic() - start < 20
    assert not any(alive(seen(run_dir, r)["pid"]) for r in (0, 1))


def test_the_cause_wins_over_what_follows_from_it(run_dir: Path) -> None:
    body = FAIL + (
        "if rank == 0: fail('Connection closed by peer', secondary=True)\ntime.sleep(0.5)\nfail('the cause')"
    )
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nthe cause"):
        go(run_dir, body)


def test_a_users_mistake_stays_one(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^a sentence$"):
        go(run_dir, FAIL + "fail('a sentence', user_error=True)")


def test_a_killed_rank_is_named(run_dir: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 was killed by SIGKILL \(out of memory\?\); its .*rank1.log"):
        go(run_dir, "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")


def test_an_exit_without_a_report(run_dir: Path) -> None:
    with pytest.raises(RankError, match=r"ranks ended without a report \(exit codes: rank 1: 7\)"):
        go(run_dir, "if rank == 1: os._exit(7)")


def test_an_earlier_runs_files_do_not_count(run_dir: Path) -> None:
    (run_dir / "errors").mkdir()
    (run_dir / "errors" / "rank0.json").write_text("stale")
    (run_dir / "result.json").write_text("stale")
    (run_dir / "do.py").write_text("")
    with pytest.raises(RankError, match=r"every rank ended well, but .*result.json is missing"):
        launch.run(run_dir, 1)


def wait_for(run_dir: Path, pattern: str, count: int) -> None:
    end = time.monotonic() + 30
    while len(list(run_dir.glob(pattern))) < count and time.monotonic() < end:
        time.sleep(0.02)


def signal_when_ready(run_dir: Path, signum: int) -> threading.Thread:
    def send() -> None:
        wait_for(run_dir, "ready*", 2)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


SAVES = (
    "def save(signum, frame):\n"
    "    (run_dir / f'saved{rank}').write_text(signal.Signals(signum).name)\n"
    "    sys.exit(0)\n"
    "for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(s, save)\n"
    "(run_dir / f'ready{rank}').touch()\n"
    "time.sleep(60)\n"
)


@pytest.mark.parametrize(
    ("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, launch.Terminated)]
)
def test_ranks_may_save_when_asked_to_stop(run_dir: Path, signum: int, raised: type[BaseException]) -> None:
    before = signal.getsignal(signum)
    thread = signal_when_ready(run_dir, signum)
    with pytest.raises(raised):
        go(run_dir, SAVES)
    thread.join()
    name = signal.Signals(signum).name
    assert [(run_dir / f"saved{r}").read_text() for r in (0, 1)] == [name, name]
    assert signal.getsignal(signum) is before


def test_ranks_may_save_when_a_handler_leaves(run_dir: Path) -> None:
    """As submitit's does, once it has asked SLURM to put the job back into the queue."""
    before = signal.signal(signal.SIGUSR2, lambda *_: sys.exit(-1))
    try:
        thread = signal_when_ready(run_dir, signal.SIGUSR2)
        with pytest.raises(SystemExit):
            go(run_dir, SAVES)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [(run_dir / f"saved{r}").read_text() for r in (0, 1)] == ["SIGTERM", "SIGTERM"]


def test_ranks_that_do_not_listen_are_killed_after_the_grace(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    thread = signal_when_ready(run_dir, signal.SIGTERM)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(run_dir / f'ready{rank}').touch()\ntime.sleep(60)"
    with pytest.raises(launch.Terminated):
        go(run_dir, deaf)
    thread.join()
    assert not any(alive(seen(run_dir, r)["pid"]) for r in (0, 1))


def test_usr1_is_passed_on_and_the_run_goes_on(run_dir: Path) -> None:
    thread = signal_when_ready(run_dir, signal.SIGUSR1)
    assert go(
        run_dir,
        SAVES.replace("sys.exit(0)", "raise InterruptedError").replace(
            "time.sleep(60)\n", ("try: time.sleep(60)\nexcept InterruptedError: pass\n")
        ),
    ) == {"metrics": {}}
    thread.join()
    assert [(run_dir / f"saved{r}").read_text() for r in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_the_pipe_tells_a_rank_of_our_death(run_dir: Path) -> None:
    (run_dir / "do.py").write_text("(run_dir / f'end{rank}').write_text(repr(sys.stdin.buffer.read()))")
    code = (
        "from pathlib import Path\n"
        "from lit_pretrain.cli import launch\n"
        "launch.WORKER = 'stand_in_worker'\n"
        f"launch.run(Path({str(run_dir)!r}), 2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(run_dir, "seen*", 2)
    parent.kill()
    parent.wait()
    wait_for(run_dir, "end*", 2)
    assert [(run_dir / f"end{r}").read_text() for r in (0, 1)] == ["b''", "b''"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8"}, (3, 8, "torchrun")),
        ({"RANK": "3", "WORLD_SIZE": "8"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, (1, 4, "srun")),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "batch"}, None),  # in sbatch, before any srun
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, None),
    ],
)
def test_who_started_us(environment: dict[str, str], expected: tuple[int, int, str] | None) -> None:
    outer = ranks.external(environment)
    assert (outer and (outer.rank, outer.world_size, outer.by)) == expected


def report(run_dir: Path, rank: int, error: BaseException, at: float) -> None:
    failures.write(run_dir, rank, error)
    path = run_dir / failures.FOLDER / f"rank{rank}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": at}))


def test_a_rank_aborted_after_the_cause_is_not_the_cause(tmp_path: Path) -> None:
    report(tmp_path, 0, ValueError("first"), at=10.0)
    error = failures.first(tmp_path, {0: 1, 1: -signal.SIGABRT}, {0: 10.1, 1: 11.0})
    assert isinstance(error, RankError)
    assert "rank 0 of 2 failed" in str(error)
    report(tmp_path, 0, ValueError("first"), at=12.0)
    error = failures.first(tmp_path, {0: 1, 1: -signal.SIGABRT}, {0: 12.1, 1: 11.0})
    assert "rank 1 of 2 was killed by SIGABRT;" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1234",
        "NCCL error: remote process exited or there was a network error",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)",
        "writev: Broken pipe",
    ],
)
def test_errors_of_the_transport_come_second(tmp_path: Path, text: str) -> None:
    report(tmp_path, 0, RuntimeError(text), at=1.0)
    report(tmp_path, 1, RuntimeError("the cause"), at=2.0)
    assert "rank 1 of 2" in str(failures.first(tmp_path, {0: 1, 1: 1}, {}))


def test_a_full_disk_is_said_where_not_even_a_report_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / failures.FOLDER).write_text("a file: nothing can be written in it")
    assert failures.write(tmp_path, 0, RuntimeError("boom")) is False
    assert isinstance(failures.first(tmp_path, {0: 1}, {}), RankError)
    monkeypatch.setattr(failures, "FULL_BYTES", 2**63)
    error = failures.first(tmp_path, {0: 1}, {})
    assert isinstance(error, ConfigError)
    assert "no space left on the disk" in str(error)


def preempt(run_dir: Path, *, first: str) -> None:
    """Ranks that save on SIGTERM and say so; ``first`` runs in rank 0 before it waits for the signal."""
    body = f"""
def stop(*_):
    if rank == 0:
        time.sleep(1.5)  # files to close, longer than SETTLE_S
        result = {{'ended': 'preempted', 'signal': 'SIGTERM', 'steps': 7, 'checkpoint': 'c', 'requeued': False}}
        (run_dir / 'result.json').write_text(json.dumps(result))
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
(run_dir / f'ready{{rank}}').touch()
if rank == 0:
    while not (run_dir / 'ready1').exists():
        time.sleep(0.01)
    {first}
time.sleep(60)
"""
    with pytest.raises(Preempted) as e:
        go(run_dir, body)
    assert (e.value.step, e.value.signal, e.value.checkpoint, e.value.code) == (7, "SIGTERM", "c", 75)


def test_preempted_ranks_are_no_failure(run_dir: Path) -> None:
    """Not asked by us: SLURM signals every process by itself."""
    preempt(
        run_dir,
        first="[os.kill(p['pid'], 15) for p in [json.loads((run_dir / f'seen{r}.json').read_text()) for r in (1, 0)]]",
    )
    assert not (run_dir / failures.FOLDER).exists()


def test_a_signal_to_the_command_is_a_preemption_where_the_ranks_save(run_dir: Path) -> None:
    preempt(run_dir, first="os.kill(os.getppid(), 15)")


def test_a_job_of_a_sweep_ends_with_the_command(run_dir: Path) -> None:
    command = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    (run_dir / "do.py").write_text("(run_dir / f'ready{rank}').touch(); time.sleep(60)")

    def kill() -> None:
        while len(list(run_dir.glob("ready*"))) < 2:
            time.sleep(0.01)
        command.kill()  # not buried yet: a zombie is dead enough

    threading.Thread(target=kill).start()
    try:
        with pytest.raises(launch.Terminated):
            launch.run(run_dir, 2, orphan_of=command.pid)
    finally:
        command.communicate()
    assert not any(alive(int(str(seen(run_dir, rank)["pid"]))) for rank in (0, 1))


def test_whose_end_is_a_jobs_own() -> None:
    assert ranks.command_to_watch({}) is None
    assert ranks.command_to_watch({ranks.COMMAND_VARIABLE: ranks.this_command()}) is None
    machine = ranks.this_command().partition("@")[2]
    assert ranks.command_to_watch({ranks.COMMAND_VARIABLE: f"1@{machine}"}) == 1
    assert ranks.command_to_watch({ranks.COMMAND_VARIABLE: "1@another-machine"}) is None
    assert ranks.is_alive(os.getpid())
    assert not ranks.is_alive(2**22 + 1)  # beyond the largest process id of Linux
