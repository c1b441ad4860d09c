"""Killed with SIGKILL and resumed in new processes, one rank and two; other ranks than before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lit_pretrain.callbacks import ExactResume, PreemptionCheckpoint, RunCheckpoint
from lit_pretrain.data import TokenDataModule
from lit_pretrain.errors import RankError
from tests.support import resumable

# Hook and how often it is called before the blow. 18 microbatches an epoch, two a window, a validation of one batch
# after every third update; RunCheckpoint saves after every update.
KILLS = {
    "in a step": ("on_before_optimizer_step", 5),
    "in a window": ("on_train_batch_start", 12),
    "in a later epoch": ("on_after_backward", 31),
    "in validation": ("on_validation_batch_start", 3),
    "while saving": ("on_save_checkpoint", 14),
    "at an epoch's end": ("on_train_epoch_end", 1),
}


class KillHere(resumable.Kill):
    """All ranks, or one of them."""

    def __init__(self, hook: str, count: int, rank: int | None) -> None:
        if rank is None or rank == int(os.environ["RANK"]):
            super().__init__(hook, count)


def train(root: str, folder: str, kill: Any, settings: dict[str, Any]) -> dict[str, Any]:
    extra: list[Any] = [] if kill is None else [KillHere(*kill)]
    return resumable.run(root, folder, callbacks=extra, **settings)


def survive(ranks: Any, world: int, root: str, folder: str, blows: list[Any], **settings: Any) -> list[dict[str, Any]]:
    """Run until it is done, whatever happens on the way; each blow falls once."""
    for blow in blows:
        with pytest.raises(RankError, match="SIGKILL"):
            ranks(world, train, root, folder, blow, settings)
    return ranks(world, train, root, folder, None, settings)


def told(folder: str, world: int, *kinds: str) -> list[list[Any]]:
    """The lines of these kinds, per rank, on the way to the final weights."""
    return [[x for x in resumable.history(folder, rank) if any(kind in x for kind in kinds)] for rank in range(world)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    resumable.corpus(folder)
    return str(folder)


def is_same_run(root: str, tmp_path: Path, ranks: Any, world: int, blows: list[Any], **settings: Any) -> None:
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    expected = ranks(world, train, root, whole, None, settings)
    got = survive(ranks, world, root, killed, blows, **settings)
    assert got == expected  # weights, optimizer, random states of each rank, counts, early stopping
    everything = ("read", "update", "validated", "epoch_end")
    assert told(killed, world, *everything) == told(whole, world, *everything)
    for rank in range(world):
        assert [x["read"] for x in told(killed, world, "read")[rank]] == list(range(40))  # the plan


SLOW = ("in a step", "in a later epoch", "at an epoch's end")


@pytest.mark.parametrize(
    "blow", [pytest.param(b, id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n, b in KILLS.items()]
)
def test_one_process(root: str, tmp_path: Path, ranks: Any, blow: tuple[str, int]) -> None:
    is_same_run(root, tmp_path, ranks, 1, [(*blow, None)])


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_from_folders_written_in_the_background(root: str, tmp_path: Path, ranks: Any, world: int) -> None:
    """A blow falls while a thread writes: what it leaves unfinished is not taken."""
    is_same_run(root, tmp_path, ranks, world, [("on_train_batch_start", 14, None)], folders=True)
    left = [p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()]
    assert sorted(left) == ["step-00000018", "step-00000019", "step-00000020"]


@pytest.mark.slow
def test_one_process_killed_again_and_again(root: str, tmp_path: Path, ranks: Any) -> None:
    """Counts begin anew in each process."""
    blows = [("on_train_batch_start", 3, None), ("on_validation_start", 1, None), ("on_before_backward", 4, None)]
    is_same_run(root, tmp_path, ranks, 1, blows * 3)


@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.slow), 1], ids=["all ranks", "rank 1"])
def test_two_ranks(root: str, tmp_path: Path, ranks: Any, rank: int | None) -> None:
    is_same_run(root, tmp_path, ranks, 2, [(*KILLS["in a window"], rank), (*KILLS["in validation"], rank)])


@pytest.mark.slow
@pytest.mark.parametrize("blow", KILLS.values(), ids=KILLS)
def test_two_ranks_everywhere(root: str, tmp_path: Path, ranks: Any, blow: tuple[str, int]) -> None:
    is_same_run(root, tmp_path, ranks, 2, [(*blow, None)])


class Samples(Callback):
    """Writes down the tokens of every row that this rank gets, by the absolute index of the microbatch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with open(Path(self.folder) / f"samples{trainer.global_rank}.jsonl", "a") as f:
            f.write(json.dumps({"index": batch["index"], "rows": batch["ids"].tolist()}) + "\n")


def train_and_list(root: str, folder: str, kill: Any) -> None:
    extra: list[Any] = [Samples(folder), *([] if kill is None else [KillHere(*kill)])]
    resumable.run(root, folder, callbacks=extra, accumulation=4)


def test_samples_that_each_rank_reads_are_those_of_the_plan(root: str, tmp_path: Path, ranks: Any) -> None:
    """Killed twice: each rank reads its rows of each global batch, once in every life, and nothing else."""
    folder = str(tmp_path / "run")
    for blow in (("on_before_optimizer_step", 4, None), ("on_train_batch_start", 30, 1)):
        with pytest.raises(RankError, match="SIGKILL"):
            ranks(2, train_and_list, root, folder, blow)
    ranks(2, train_and_list, root, folder, None)
    data = TokenDataModule(
        resumable.corpus(Path(root)), sequence_length=resumable.T, micro_batch_size=1, global_batch_size=resumable.ROWS
    )
    shards = Path(root) / "train"
    tokens = np.fromfile(
        shards / "shard-00000.bin", json.loads((shards / "manifest.json").read_text())["dtype"]
    ).tolist()
    number = {tuple(tokens[at : at + resumable.T]): at // resumable.T for at in range(0, len(tokens), resumable.T)}
    read: list[dict[int, list[int]]] = []
    for rank in range(2):
        lives: dict[int, list[int]] = {}
        for line in map(json.loads, (tmp_path / "run" / f"samples{rank}.jsonl").read_text().splitlines()):
            rows = [number[tuple(row)] for row in line["rows"]]
            assert lives.setdefault(line["index"], rows) == rows
        assert sorted(lives) == list(range(4 * resumable.UPDATES))
        read.append(lives)
    for update in range(resumable.UPDATES):
        batch = [row for index in range(4 * update, 4 * update + 4) for rank in read for row in rank[index]]
        assert batch == data.plan.rows(update)[1].tolist()


def losses(folder: str) -> list[float]:
    return [float.fromhex(x["loss"]) for x in told(folder, 1, "update")[0]]


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_another_number_of_ranks(root: str, tmp_path: Path, ranks: Any, before: int, after: int) -> None:
    """The same global batches: without dropout the losses differ by rounding alone."""
    whole, other = str(tmp_path / "whole"), str(tmp_path / "other")
    one = {"dropout": 0.0, "accumulation": 4}
    ranks(1, train, root, whole, None, one)
    for world, steps in ((before, 7), (after, resumable.UPDATES)):
        ranks(world, train, root, other, None, one | {"accumulation": 4 // world, "max_steps": steps})
    assert len(losses(other)) == len(losses(whole)) == resumable.UPDATES
    # float32 sums of 64 terms in another order, 20 updates on: some 1e-6 of 4.1
    assert losses(other) == pytest.approx(losses(whole), abs=2e-5)
    assert losses(other) != losses(whole)
    reads = [x["read"] for x in told(other, 1, "read")[0]]
    half = 7 * 4 // before
    assert reads[:half] == list(range(half))
    assert reads[half:] == list(range(7 * 4 // after, 20 * 4 // after))


def mid_window(root: str, folder: str, resume_accumulation: int) -> list[int]:
    """Saved in the middle of a window, resumed on other terms; what was read afterwards."""

    class Save(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.fit_loop.total_batch_idx == 11:  # the last of the third window of 4
                trainer.save_checkpoint(Path(folder) / "saved.ckpt")

    resumable.run(root, f"{folder}/a", callbacks=[Save()], accumulation=4, max_steps=3)
    resumable.run(root, f"{folder}/b", ckpt_path=f"{folder}/saved.ckpt", accumulation=resume_accumulation, max_steps=4)
    return [x["read"] for x in resumable.lines(f"{folder}/b") if "read" in x]


def test_saved_in_a_window_and_resumed_with_other_microbatches(root: str, tmp_path: Path) -> None:
    assert mid_window(root, str(tmp_path), 2) == [4, 5, 6, 7]  # two updates of 4 are two of 2


class Means(Callback):
    """Logs in every step over all ranks, and notes what the end of each epoch says."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = (1.0 + batch_idx) * 3.0**trainer.global_rank / 7
        pl_module.log("mean", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1 + batch_idx % 2)
        pl_module.log("own", value, on_step=False, on_epoch=True, rank_zero_only=False, reduce_fx="sum")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.ends.append("/".join(float(trainer.callback_metrics[name]).hex() for name in ("mean", "own")))


def train_with_means(root: str, folder: str, steps: int) -> list[str]:
    means = Means()
    resumable.run(root, folder, callbacks=[means], max_steps=steps)
    return means.ends


def test_means_over_an_epoch_on_two_ranks(root: str, tmp_path: Path, ranks: Any) -> None:
    """Stopped after update 5 of the 9 of an epoch: each rank gets its own sums back, to the last bit."""
    whole = ranks(2, train_with_means, root, str(tmp_path / "whole"), 9)
    assert len(whole[0]) == 1
    assert whole[0][0].partition("/")[0] == whole[1][0].partition("/")[0]
    assert whole[0] != whole[1]
    ranks(2, train_with_means, root, str(tmp_path / "parts"), 5)
    assert ranks(2, train_with_means, root, str(tmp_path / "parts"), 9) == whole


# ---------------------------------------------------------------- what it costs


class Collectives(Callback):
    """Counts the calls of torch.distributed in each training batch, those that wait apart."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def on_train_start(self, *_: Any) -> None:
        for name in ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "monitored_barrier"):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.calls:
                self.calls[-1].append(name + (" async" if kwargs.get("async_op") else ""))
            return original(*args, **kwargs)

        return call

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append([])


def count(root: str, folder: str, preemption: bool) -> list[list[str]]:
    calls = Collectives()
    saver = RunCheckpoint(every_n_steps=100, every_minutes=60.0, save_at_end=False)
    callbacks = [calls, *([ExactResume(), saver, PreemptionCheckpoint()] if preemption else [])]
    data = TokenDataModule(
        resumable.corpus(Path(root)), sequence_length=resumable.T, micro_batch_size=2, global_batch_size=8
    )
    settings = {"limit_val_batches": 0, "max_steps": 6, "enable_checkpointing": preemption}
    resumable.trainer(folder, callbacks, **settings).fit(resumable.gpt(), datamodule=data)
    return calls.calls


def test_one_asynchronous_reduce_per_update_and_no_broadcast(root: str, tmp_path: Path, ranks: Any) -> None:
    """DDP's own reduction happens in C++ and is not seen here; Lightning's broadcast at every microbatch is.

    Both runs hold the one reduce of the module, which counts its targets over all ranks once per update.
    """
    without = ranks(2, count, root, str(tmp_path / "a"), False)[0]
    ours = ranks(2, count, root, str(tmp_path / "b"), True)[0]
    assert len(ours) == len(without) == 12
    assert [sorted(batch) for batch in ours[:-1]] == [[], ["all_reduce", "all_reduce async"]] * 5 + [[]]
    assert [sorted(batch) for batch in without[:-1]] == [["broadcast"], ["all_reduce", "broadcast"]] * 5 + [
        ["broadcast"]
    ]
