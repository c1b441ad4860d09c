"""A signal to one rank of two: one save at the same update on both, then a stop; the run goes on exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_pretrain.callbacks import PreemptionCheckpoint
from lit_pretrain.errors import Preempted
from tests.support import resumable


class Send(Callback):
    """Signals this process in one hook, from ``update`` on, once; on the ranks named only."""

    order = 5

    def __init__(self, hook: str, update: int, ranks: list[int], number: int) -> None:
        self.update, self.number = update, number
        self.sent = int(os.environ["RANK"]) not in ranks
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.update and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


class Saves(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def train(root: str, folder: str, send: Any, every: int) -> dict[str, Any]:
    saves, before = Saves(), signal.getsignal(signal.SIGTERM)
    extra = [saves, PreemptionCheckpoint(), *([] if send is None else [Send(*send)])]
    try:
        done = resumable.run(root, folder, callbacks=extra, checkpoint={"every_n_steps": every}, folders=True)
    except Preempted as stopped:
        assert signal.getsignal(signal.SIGTERM) is before
        whole = sorted(p.name for p in (Path(folder) / "checkpoints").iterdir() if (p / "COMPLETE").exists())
        return {"saves": saves.steps, "step": stopped.step, "signal": stopped.signal, "there": whole}
    return done


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


CASES = {
    # Read one update late: the reduce that was sent at the end of update 7 is read at the end of update 8.
    "in a step of rank 1": (("on_before_backward", 6, [1], signal.SIGTERM), 100, [8]),
    "in a step of rank 0": (("on_train_batch_start", 6, [0], signal.SIGUSR1), 100, [8]),
    # The validation after update 6: its end is a boundary where all ranks ask each other.
    "in a validation of rank 1": (("on_validation_batch_start", 5, [1], signal.SIGTERM), 100, [6]),
    # The save of update 4 is finished; the flag is sent at the end of update 5 and read at that of update 6.
    "in a save on rank 1": (("on_save_checkpoint", 4, [1], signal.SIGTERM), 4, [4, 6]),
    "on both": (("on_before_backward", 6, [0, 1], signal.SIGTERM), 100, [8]),
}
SLOW = ("in a step of rank 0", "on both")


@pytest.mark.parametrize(
    ("send", "every", "saves"),
    [pytest.param(*c, id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n, c in CASES.items()],
)
def test_one_save_on_all_ranks(root: str, tmp_path: Path, ranks: Any, send: Any, every: int, saves: list[int]) -> None:
    stopped = ranks(2, train, root, str(tmp_path / "run"), send, every)
    names = [f"step-{step:08d}" for step in saves]
    expected = {"saves": saves, "step": saves[-1], "signal": signal.Signals(send[3]).name, "there": names}
    assert stopped == [expected, expected]


def test_and_the_run_goes_on_exactly(root: str, tmp_path: Path, ranks: Any) -> None:
    """Stopped at update 9: a validation is due there, and the end of the epoch."""
    whole = ranks(2, train, root, str(tmp_path / "whole"), None, 100)
    stopped = ranks(2, train, root, str(tmp_path / "run"), ("on_train_batch_start", 7, [1], signal.SIGTERM), 100)
    assert stopped[0]["step"] == 9
    assert ranks(2, train, root, str(tmp_path / "run"), None, 100) == whole
    for rank in range(2):
        assert resumable.history(str(tmp_path / "run"), rank) == resumable.history(str(tmp_path / "whole"), rank)
