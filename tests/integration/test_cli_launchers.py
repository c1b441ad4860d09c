"""Sweeps of jobs of two processes through the launchers and sweepers of Hydra."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.integration.cli_processes import TWO_RANKS, alive, finish, output, start, wait_for, witnesses, workplace
from tests.support import slurm

pytestmark = pytest.mark.slow
LAUNCHERS = {
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
    "submitit_slurm": ("hydra/launcher=submitit_slurm",),
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return workplace(tmp_path)


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, work: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if request.param == "submitit_slurm":
        for name, value in slurm.install(work / "slurm").items():
            monkeypatch.setenv(name, value)
    return LAUNCHERS[request.param]


def test_a_failed_job_is_reported_and_the_other_runs(work: Path, launcher: tuple[str, ...]) -> None:
    code, out = finish(work, "-m", "run_id=s", *launcher, *TWO_RANKS, "callbacks.fail.rank=-1,1", "debug=fast")
    assert code == 1, out
    assert out.count("RuntimeError: boom on rank 1") == 1
    assert out.rstrip().endswith("lit-pretrain: 1 of 2 jobs failed: 1")
    assert json.loads((work / "outputs/s/0/result.json").read_text())["steps"] == 2
    assert not (work / "outputs/s/1/result.json").exists()
    for job in "01":
        seen = witnesses(work / "outputs" / "s" / job)
        assert [(w["rank"], w["world"]) for w in seen] == [(0, 2), (1, 2)]
        assert {w["root"] for w in seen} == {str(work / "outputs" / "s" / job)}
    pids = [w["pid"] for job in "01" for w in witnesses(work / "outputs" / "s" / job)]
    assert len(set(pids)) == 4
    assert not any(map(alive, pids))
    if "hydra/launcher=submitit_slurm" in launcher:
        states = [path.read_text() for path in (work / "slurm").glob("*.state")]
        assert states == ["COMPLETED\n"] * 2  # Hydra brings a job's exception home as its result


def test_a_sentence_is_enough_for_a_users_mistake(work: Path, launcher: tuple[str, ...]) -> None:
    code, out = finish(work, "-m", "run_id=s", *launcher, "seed=-1,1", "debug=fast")
    assert code == 1, out
    assert "seed=-1 must be a whole number from 0 to 4294967295." in out
    assert "Traceback" not in out
    assert "1 of 2 jobs failed: 0" in out


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_leaves_nothing_behind(work: Path, launcher: tuple[str, ...], signum: int, expected: int) -> None:
    words = ("-m", "run_id=s", *launcher, "seed=1,2", "length.steps=10000", "callbacks.fail.how=slow")
    process = start(work, *words)
    folder = work / "outputs" / "s"
    assert wait_for(lambda: len(list(folder.glob("*/witness-0.json"))) == 2), output(work)
    time.sleep(0.5)
    pids = [w["pid"] for job in "01" for w in witnesses(folder / job)]
    process.send_signal(signum)
    assert process.wait(60) == expected, output(work)
    assert wait_for(lambda: not any(map(alive, pids)), 60)


def test_optuna_minimises_the_validation_loss(work: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    words = (*words, "optimizer.lr=interval(0.001,0.1)", "debug=fast", *TWO_RANKS)
    code, out = finish(work, "-m", "run_id=s", *words, timeout=480)
    assert code == 0, out
    losses = {}
    for job in "012":
        folder = work / "outputs" / "s" / job
        losses[witnesses(folder)[0]["lr"]] = json.loads((folder / "result.json").read_text())["metrics"]["val/loss"]
    assert len(losses) == 3
    best = yaml.safe_load((work / "outputs/s/optimization_results.yaml").read_text())
    assert best["best_value"] == pytest.approx(min(losses.values()))
    assert losses[best["best_params"]["optimizer.lr"]] == min(losses.values())


@pytest.mark.parametrize(("seed", "failing"), [(10, "0"), (8, "1")], ids=["first fails", "last fails"])
def test_optuna_goes_on_after_a_failed_trial_where_it_is_told_to(work: Path, seed: int, failing: str) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1")
    words = (*words, "hydra.sweeper.max_failure_rate=1.0", f"hydra.sweeper.sampler.seed={seed}")
    code, out = finish(work, "-m", "run_id=s", *words, "optimizer.lr=choice(-1,0.01)", "debug=fast")
    assert code == 1, out
    folder = work / "outputs" / "s"
    (failed,) = (path.parent.name for path in folder.glob("*/failure.json"))
    (finished,) = (path.parent.name for path in folder.glob("*/result.json"))
    assert (failed, finished) == (failing, str(1 - int(failing)))
    assert f"=== job {failed} failed (" in out
    assert out.rstrip().endswith(f"lit-pretrain: 1 of 2 jobs failed: {failed}")
    assert f"least val/loss: job {finished} (optimizer.lr=0.01)" in out
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["best_params"] == {"optimizer.lr": 0.01}
