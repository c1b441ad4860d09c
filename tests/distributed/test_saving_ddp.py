"""Two ranks and one writer: what fails on rank 0 ends the run on both, and rank 0's clock decides for both."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_pretrain.callbacks import PreemptionCheckpoint
from lit_pretrain.distributed.checkpoint import background, catalog
from lit_pretrain.errors import ConfigError, Preempted, RankError
from lit_pretrain.plugins import checkpoint_io
from tests.support import resumable


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


def rank() -> int:
    return int(os.environ["RANK"])


class Seen(Callback):
    """The update that this rank has come to, and the updates that were saved."""

    def __init__(self) -> None:
        self.step = 0
        self.saves: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.saves.append(trainer.global_step)


def fill_disk(at: int) -> None:
    """From the checkpoint of update ``at`` on, writing fails in this process, which is a rank of its own."""
    for module, name in ((background, "write_packed"), (checkpoint_io, "write_checkpoint")):
        real = getattr(module, name)

        def write(folder: Path, *args: Any, real: Any = real, **settings: Any) -> Any:
            if int(folder.name.removeprefix("step-")) < at:
                return real(folder, *args, **settings)
            raise checkpoint_io.CheckpointError(f"{folder.name} could not be written (No space left on device)")

        setattr(module, name, write)


def train_on_a_full_disk(root: str, folder: str, at: int, in_background: bool, every: int) -> dict[str, Any]:
    fill_disk(at)
    seen, plugin = Seen(), checkpoint_io.FolderCheckpointIO(background=in_background)
    started = time.monotonic()
    try:
        resumable.run(
            root, folder, callbacks=[seen], checkpoint={"every_n_steps": every}, plugins=[plugin], max_steps=12
        )
    except ConfigError as error:
        return {"said": str(error), "step": seen.step, "seconds": time.monotonic() - started}
    return {}


FULL = {
    # Failed in a thread after the save of update 4: the ranks ask each other at the end of update 5, and hear the
    # answer at the end of update 6, unless the thread was slow.
    "in the background": (4, True, 4, (6, 7, 8)),
    "in the save itself": (4, False, 4, (4,)),
    "at the end of the run": (12, True, 100, (12,)),
}


@pytest.mark.parametrize(("at", "in_background", "every", "steps"), FULL.values(), ids=FULL)
def test_a_failed_save_ends_the_run_on_every_rank(
    root: str, tmp_path: Path, ranks: Any, at: int, in_background: bool, every: int, steps: tuple[int, ...]
) -> None:
    ended = ranks(2, train_on_a_full_disk, root, str(tmp_path / "run"), at, in_background, every, timeout_s=120)
    assert ended[0].get("said") == f"step-{at:08d} could not be written (No space left on device)"
    assert ended[1]["said"] == ended[0]["said"]
    assert ended[0]["step"] == ended[1]["step"] in steps
    # Nobody waited for a rank that had gone.
    assert max(one["seconds"] for one in ended) < 60
    assert catalog.complete(tmp_path / "run" / "checkpoints") == []


def train_by_the_clock(root: str, folder: str) -> list[int]:
    """A minute passes with each update on rank 0; rank 1's clock has jumped ahead, and runs a hundred times as fast."""
    seen = Seen()

    def clock() -> float:
        return 60.0 * seen.step if rank() == 0 else 1e6 + 6000.0 * seen.step

    settings = {"every_n_steps": None, "every_minutes": 3, "keep_last": 99, "save_at_end": False, "clock": clock}
    resumable.run(root, folder, callbacks=[seen], checkpoint=settings, max_steps=11)
    return seen.saves


def test_the_clock_of_rank_0_decides(root: str, tmp_path: Path, ranks: Any) -> None:
    """Three minutes are over at update 3, and the ranks learn of it at update 4, where the clock starts anew."""
    assert ranks(2, train_by_the_clock, root, str(tmp_path / "run")) == [[4, 8], [4, 8]]
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}.ckpt" for step in (4, 8)]


class Boom(Callback):
    order = 990

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and rank() in self.ranks:
            raise RuntimeError("boom")


def train_and_fail(root: str, folder: str, where: tuple[int, ...]) -> str:
    try:
        resumable.run(root, folder, callbacks=[Boom(where)], checkpoint={"every_n_steps": 100}, folders=True)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_exception_on_every_rank_saves(root: str, tmp_path: Path, ranks: Any) -> None:
    assert ranks(2, train_and_fail, root, str(tmp_path / "run"), (0, 1)) == ["boom", "boom"]
    (found,) = catalog.complete(tmp_path / "run" / "checkpoints")
    assert (found.facts.global_step, found.facts.reason) == (5, "exception")
    assert found.facts.microbatches_read == 10


@pytest.mark.slow  # the ranks wait 10 s for each other
def test_an_exception_on_one_rank_saves_nothing_and_hangs_nobody(root: str, tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2, train_alone_and_die, root, str(tmp_path / "run"), timeout_s=120)
    assert "boom" in str(raised.value), str(raised.value)
    assert catalog.complete(tmp_path / "run" / "checkpoints") == []


def train_alone_and_die(root: str, folder: str) -> None:
    resumable.run(root, folder, callbacks=[Boom((1,))], checkpoint={"every_n_steps": 100}, folders=True)


class Signal(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        import signal

        if trainer.global_step == 3 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted_on_a_full_disk(root: str, folder: str) -> str:
    fill_disk(0)
    try:
        resumable.run(
            root,
            folder,
            callbacks=[Signal(), PreemptionCheckpoint()],
            checkpoint={"every_n_steps": 100},
            folders=True,
        )
    except Preempted:
        return "preempted"
    except ConfigError as error:
        return str(error)
    return "finished"


def test_a_preemption_that_cannot_save_fails_on_every_rank(root: str, tmp_path: Path, ranks: Any) -> None:
    first, second = ranks(2, preempted_on_a_full_disk, root, str(tmp_path / "run"), timeout_s=120)
    assert first == second
    assert "No space left on device" in first
