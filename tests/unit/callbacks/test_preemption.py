"""A signal in one process: one checkpoint at the next boundary, a stop that is no failure, handlers as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import ExactResume, PreemptionCheckpoint, RunCheckpoint
from lit_pretrain.callbacks._saving import slurm
from lit_pretrain.errors import ConfigError, Preempted
from tests.support import resumable
from tests.unit.callbacks.tiny import Tiny, loader, trainer


@pytest.fixture(autouse=True)
def _handlers_as_before():
    """A user's own handler stands for whatever was there."""

    def mine(number, frame):
        raise AssertionError(f"the handler of before got signal {number} while the run trained")

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, mine) for number in numbers]
    yield
    now = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert now == [mine, mine]


class Send(Callback):
    """Sends this process signals in one hook, at its ``count``-th call from ``update`` on."""

    order = 5

    def __init__(self, hook, *signals, update=3, count=1):
        self.signals, self.update, self.left = signals or (signal.SIGTERM,), update, count
        setattr(self, hook, self._send)

    def _send(self, fit, *_):
        if fit.global_step >= self.update:
            self.left -= 1
            if self.left == 0:
                for number in self.signals:
                    os.kill(os.getpid(), number)


class Saves(Callback):
    def __init__(self):
        self.steps = []

    def on_save_checkpoint(self, fit, *_):
        self.steps.append(fit.global_step)


def fit(tmp_path, *callbacks, **settings):
    settings = {
        "max_steps": 10,
        "accumulate_grad_batches": 2,
        "val_check_interval": 8,
        "check_val_every_n_epoch": None,
        **settings,
    }
    run = trainer(tmp_path, *callbacks, enable_checkpointing=True, **settings)
    run.fit(Tiny(lr=0.01), loader(), loader(8))
    return run


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_start", 4),
        ("on_after_backward", 4),
        ("on_train_batch_end", 3),  # sent at the boundary itself, by a callback before this one
        ("on_validation_batch_start", 4),  # the validation after update 4
        ("on_validation_start", 4),
        ("on_train_epoch_end", 9),  # 8 updates an epoch: the next boundary is in the next one
    ],
)
def test_one_save_at_the_next_boundary(tmp_path, hook, step):
    saves, preemption = Saves(), PreemptionCheckpoint()
    sender = Send(hook, update=3)
    with pytest.raises(Preempted) as stopped:
        fit(tmp_path, RunCheckpoint(save_at_end=True), saves, preemption, sender, ExactResume())
    assert saves.steps == [step]
    assert preemption.preempted_at == stopped.value.step == step
    assert (stopped.value.signal, stopped.value.code, stopped.value.requeued) == ("SIGTERM", 75, False)
    assert stopped.value.checkpoint == str(tmp_path / "checkpoints" / f"step-{step:08d}.ckpt")
    assert Path(stopped.value.checkpoint).exists()
    assert f"saved {stopped.value.checkpoint} at update {step}" in str(stopped.value)


def test_in_the_middle_of_a_save(tmp_path):
    """The interval's own save is finished; the signal's comes at the update after it."""
    saves = Saves()
    with pytest.raises(Preempted):
        fit(
            tmp_path, RunCheckpoint(every_n_steps=3), saves, PreemptionCheckpoint(), Send("on_save_checkpoint")
        )  # fmt: skip
    assert saves.steps == [3, 4]


def test_more_signals_are_one_save(tmp_path):
    saves = Saves()
    both = Send("on_train_batch_start", signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
    again = Send("on_save_checkpoint", signal.SIGTERM)
    at_the_end = Send("on_exception", signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(Preempted) as stopped:
        fit(tmp_path, RunCheckpoint(), saves, PreemptionCheckpoint(), both, again, at_the_end)
    assert saves.steps == [4]
    assert stopped.value.signal == "SIGTERM"


def test_a_finished_run_just_ends(tmp_path):
    saves, preemption = Saves(), PreemptionCheckpoint()
    sender = Send("on_train_batch_end", update=10)
    run = fit(tmp_path, RunCheckpoint(), saves, preemption, sender)
    assert run.global_step == 10
    assert saves.steps == [10]
    assert preemption.preempted_at is None


def test_without_a_signal_nothing_happens(tmp_path):
    run = fit(tmp_path, PreemptionCheckpoint(), ModelCheckpoint(tmp_path))
    assert run.global_step == 10
    assert run.received_sigterm is False


def test_handlers_are_back_after_an_error(tmp_path):
    class Fail(Callback):
        def on_train_batch_start(self, fit, *_):
            if fit.global_step == 2:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, PreemptionCheckpoint(), Fail())


@pytest.mark.parametrize("folder", ["of ModelCheckpoint", "own", "default"])
def test_where_it_saves_in_a_foreign_project(tmp_path, folder):
    model = [ModelCheckpoint(tmp_path / "theirs")] if folder == "of ModelCheckpoint" else []
    own = tmp_path / "own" if folder == "own" else None
    with pytest.raises(Preempted) as stopped:
        fit(tmp_path, PreemptionCheckpoint(dirpath=own), Send("on_train_batch_start"), *model)
    where = {"of ModelCheckpoint": "theirs", "own": "own", "default": "checkpoints"}[folder]
    assert stopped.value.checkpoint == str(tmp_path / where / "step-00000004.ckpt")
    assert Path(stopped.value.checkpoint).exists()


def test_in_another_thread_it_says_so(tmp_path):
    said = []

    def train():
        with pytest.warns(UserWarning, match="hears no signals") as caught:
            fit(tmp_path, PreemptionCheckpoint(), max_steps=2)
        said.append(len(caught))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert said


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_start", "on_train_epoch_start"])
def test_the_run_goes_on_exactly(tmp_path_factory, tmp_path, hook):
    """Validation due at that very update is run after the resume, as it would have been."""
    root = str(tmp_path_factory.mktemp("shards"))
    whole = resumable.run(root, str(tmp_path / "whole"), checkpoint={"every_n_steps": 100})
    with pytest.raises(Preempted):
        resumable.run(
            root,
            str(tmp_path / "stopped"),
            callbacks=[PreemptionCheckpoint(), Send(hook, update=8)],
            checkpoint={"every_n_steps": 100},
        )
    assert resumable.run(root, str(tmp_path / "stopped"), callbacks=[PreemptionCheckpoint()]) == whole
    assert resumable.history(str(tmp_path / "stopped")) == resumable.history(str(tmp_path / "whole"))


# ---------------------------------------------------------------- SLURM


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A ``scontrol`` on PATH that writes down what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    log = tmp_path / "scontrol.log"
    program.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import os, sys
            open({str(log)!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
            if os.environ.get("FAKE_SCONTROL_FAILS"):
                sys.exit("slurm_requeue error: Requested operation is presently disabled")
        """)
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "pretrain")
    return log


@pytest.mark.parametrize(
    ("number", "array", "asked"),
    [
        (signal.SIGUSR1, {}, "requeue 4711\n"),
        (signal.SIGUSR1, {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 4700_3\n"),
        (signal.SIGTERM, {}, None),  # scancel
    ],
)
def test_requeue_after_the_save(tmp_path, scontrol, monkeypatch, number, array, asked):
    for name, value in array.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Preempted) as stopped:
        fit(
            tmp_path,
            RunCheckpoint(),
            PreemptionCheckpoint(),
            Send("on_train_batch_start", number),
            plugins=_not_slurm(),
        )
    assert stopped.value.requeued == (asked is not None)
    assert (scontrol.read_text() if scontrol.exists() else None) == asked
    assert ("back in the queue" in str(stopped.value)) == (asked is not None)


def _not_slurm():
    """Lightning reads the same variables and would want srun; its own requeue stays off as the docs tell."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    return [LightningEnvironment()]


def test_a_refused_requeue_is_said_and_the_run_is_saved(tmp_path, scontrol, monkeypatch):
    monkeypatch.setenv("FAKE_SCONTROL_FAILS", "1")
    send = Send("on_train_batch_start", signal.SIGUSR1)
    with pytest.warns(UserWarning, match="did not requeue job 4711.*presently disabled"), pytest.raises(Preempted) as s:
        fit(tmp_path, RunCheckpoint(), PreemptionCheckpoint(), send, plugins=_not_slurm())
    assert s.value.requeued is False
    assert Path(s.value.checkpoint).exists()


def test_job_ids():
    assert slurm.job_id({}) is None
    assert slurm.job_id({"SLURM_JOB_ID": "7"}) == "7"
    assert slurm.job_id({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash"}) is None


def test_no_such_signal():
    with pytest.raises(ConfigError, match="'SIGKILL' cannot be handled"):
        PreemptionCheckpoint(signals=["SIGKILL"])
    with pytest.raises(ConfigError, match="'SIGBOGUS'"):
        PreemptionCheckpoint(requeue_signals=["SIGBOGUS"])


def test_a_script_that_knows_nothing_of_it_ends_with_code_75():
    code = "from lit_pretrain.errors import Preempted; raise Preempted(signal='SIGTERM', step=3, checkpoint='x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "")
