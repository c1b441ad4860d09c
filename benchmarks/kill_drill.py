"""Kills a training run at random moments, resumes it in new processes, and compares it with one that never stopped.

``python -m benchmarks.kill_drill [--runs 50] [--worlds 1 2] [--strategy zero3] [--with damage disk]`` prints a table,
writes JSON with the revision, and exits with 1 unless every run ended bit-equal: weights, optimizer state, random state
of every rank, loss of every update, and the batches every rank read.

A run is a small GPT with dropout, accumulation, validation and two ends of an epoch, saved in the background after
every update, so that many kills fall into a save. ``damage`` also flips a byte of the newest checkpoint after a kill:
it has to be passed over, aloud. ``disk`` lets the file system fill up instead (Linux, and the right to mount one).
``rollback`` has bad data in the middle of the run: kills fall before, during and after the rollback, and the run that
was never stopped has rolled back, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.__main__ import circumstances
from lit_pretrain.distributed.checkpoint import newest
from lit_pretrain.errors import RankError
from lit_pretrain.plugins import FolderCheckpointIO
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support import resumable, spiking
from tests.support.ranks import RankPool

CHECKPOINTS = "checkpoints"
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"stage": 3},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "cp2": {"context_parallel_size": 2},
}
"""Of 2 ranks; settings of a HybridParallelStrategy. Every rank saves its part."""
LIMIT_S = 240.0  # of one attempt


class KillLater(Callback):
    """SIGKILL to this process some time after training began, whatever it is doing then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        threading.Thread(target=self._strike, daemon=True).start()

    def _strike(self) -> None:
        time.sleep(self.seconds)
        os.kill(os.getpid(), signal.SIGKILL)


class Duration(Callback):
    """Seconds from the beginning of training to its end."""

    seconds = 0.0
    started = 0.0

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self.started = time.monotonic()

    def on_train_end(self, *_: Any) -> None:
        """Stop it."""
        self.seconds = time.monotonic() - self.started


def attempt(root: str, folder: str, kill_after_s: float | None, strategy: str | None = None) -> dict[str, Any]:
    """One rank: go on from the newest checkpoint that is whole, until the end or the kill."""
    said: list[str] = []
    saved = Path(folder) / CHECKPOINTS
    found = newest(saved, say=said.append) if saved.is_dir() else None
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / f"said{os.environ.get('RANK', '0')}.jsonl", "a") as f:
        f.writelines(json.dumps(line) + "\n" for line in said)
    duration = Duration()
    settings: dict[str, Any] = {}
    if strategy is not None:
        settings["strategy"] = HybridParallelStrategy(**LAYOUTS[strategy])
        if strategy != "zero3":
            settings["replicas"] = 1
        if strategy == "cp2":
            settings["dropout"] = 0.0  # ring attention has none
    outcome = resumable.run(
        root,
        folder,
        callbacks=[duration, *([] if kill_after_s is None else [KillLater(kill_after_s)])],
        folders=True,
        ckpt_path=None if found is None else str(found.path),
        **settings,
    )
    was_over = found is not None and found.facts.global_step == resumable.UPDATES
    return outcome | {"seconds": duration.seconds, "was_over": was_over}


class Drill:
    """All runs on one number of ranks.

    Args:
        pool: Starts the ranks.
        world_size: Ranks.
        folder: For the runs.
        seed: Of the moments.
        strategy: Of ``LAYOUTS``; None for Lightning's own.
    """

    def __init__(
        self, pool: RankPool, *, world_size: int, folder: Path, seed: int, strategy: str | None = None
    ) -> None:
        self.pool, self.world_size, self.folder, self.strategy = pool, world_size, folder, strategy
        self.random = random.Random(seed)
        self.root = str(folder / "data")
        reference = folder / "reference"
        outcomes = self._train(reference)
        self.seconds = min(outcome.pop("seconds") for outcome in outcomes)
        self.outcomes = outcomes
        self.history = self._history(reference)
        saved = newest(reference / CHECKPOINTS)
        assert saved is not None
        self.checkpoint_bytes = saved.size

    def _history(self, run: Path) -> list[list[dict[str, Any]]]:
        return [resumable.history(str(run), rank) for rank in range(self.world_size)]

    def finish(self, run: Path, kills: int, *, damage: bool) -> dict[str, Any]:
        """Kill a run so many times, then let it end; what came of it."""
        record: dict[str, Any] = {"kills": 0, "in a save": 0, "damaged": [], "equal": False, "wrong": ""}
        outcomes = None
        for _ in range(kills):
            outcomes = self._train_until_killed(run)
            if outcomes is not None:  # it was faster than the kill
                break
            record["kills"] += 1
            record["in a save"] += any(run.glob(f"{CHECKPOINTS}/.*.tmp"))
            if damage and (victim := self._flip(run)):
                record["damaged"].append(victim)
        self._compare(run, outcomes or self._train(run), record)
        said = (run / "said0.jsonl").read_text()
        unsaid = [name for name, checkpoint in record["damaged"] if checkpoint not in said]
        if unsaid:
            record.update(equal=False, wrong=f"nothing was said of the damage in {unsaid[0]}")
        return record

    def fill_disk(self, run: Path) -> dict[str, Any]:
        """Let the file system be too small for the run at first; what came of it."""
        record: dict[str, Any] = {"kills": 0, "in a save": 0, "damaged": [], "equal": False, "wrong": ""}
        run.mkdir()
        size = f"size={int(self.checkpoint_bytes * self.random.uniform(0.5, 3.0))}"  # of the three that are kept
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(run)], check=True)
        try:
            try:
                self._train(run)
                record["wrong"] = "the disk was never full"
            except RankError as error:
                record["kills"] = 1
                if "No space left" not in str(error):
                    record["wrong"] = str(error)[-500:]
            subprocess.run(["mount", "-o", "remount,size=64m", str(run)], check=True)
            if not record["wrong"]:
                self._compare(run, self._train(run), record)
        finally:
            subprocess.run(["umount", str(run)], check=True)
        return record

    def _train(self, run: Path, kill_after_s: float | None = None) -> list[dict[str, Any]]:
        with contextlib.redirect_stdout(io.StringIO()):  # what the ranks say; an error holds it too
            return self.pool(
                self.world_size, attempt, self.root, str(run), kill_after_s, self.strategy, timeout_s=LIMIT_S
            )

    def _train_until_killed(self, run: Path) -> list[dict[str, Any]] | None:
        # Any moment of the run that is left, and now and then shortly after it began.
        seconds = self.random.random() ** 2 * self.seconds if self.random.random() < 0.3 else None
        seconds = self.random.uniform(0.0, self.seconds) if seconds is None else seconds
        try:
            return self._train(run, seconds)
        except RankError as error:
            if "SIGKILL" not in str(error):
                raise
        return None

    def _flip(self, run: Path) -> tuple[str, str] | None:
        found = newest(run / CHECKPOINTS)
        if found is None:
            return None
        files = sorted(p for p in found.path.rglob("*") if p.is_file())
        path = self.random.choice(files)
        content = bytearray(path.read_bytes())
        if not content:
            return None
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        path.write_bytes(content)
        return f"{found.path.name}/{path.relative_to(found.path)}", found.path.name

    def _compare(self, run: Path, outcomes: list[dict[str, Any]], record: dict[str, Any]) -> None:
        history = self._history(run)
        for rank, (mine, theirs) in enumerate(zip(outcomes, self.outcomes, strict=True)):
            # Killed after its last save: nothing was left to train, and random numbers are for training alone.
            finished = mine["was_over"]
            keys = ("weights", "optimizer", "step") if finished else theirs.keys() - {"was_over"}
            different = [key for key in keys if mine[key] != theirs[key]]
            if different:
                record["wrong"] = f"rank {rank} ended with other {', '.join(different)}"
                return
            expected = [x for x in self.history[rank] if not finished or "update" in x or "read" in x]
            found = [x for x in history[rank] if not finished or "update" in x or "read" in x]
            if found != expected:
                pairs = zip(found, expected, strict=False)
                first = next((pair for pair in pairs if pair[0] != pair[1]), "one is longer")
                record["wrong"] = f"rank {rank} took another way: {first}"
                return
        record["equal"] = True


class RollbackDrill(Drill):
    """Runs with bad data in them; a checkpoint after every fifth update leaves something to roll back."""

    def _train(self, run: Path, kill_after_s: float | None = None) -> list[dict[str, Any]]:
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = self.root, str(run), kill_after_s, self.strategy
            return self.pool(self.world_size, attempt_with_rollback, *arguments, timeout_s=LIMIT_S)

    def _history(self, run: Path) -> list[list[dict[str, Any]]]:
        """Every update as it was made last: bad ones were taken back, and a resumed run may know and leave them out."""
        last = []
        for rank in range(self.world_size):
            lines = [line for line in resumable.lines(str(run), rank) if "update" in line]
            # A line that was written in the moment of going back bears the number of the update gone back to.
            updates = {line["update"]: line for line in lines if line["logged_as"] + 1 == line["update"]}
            last.append([updates[number] for number in sorted(updates)])
        return last


def attempt_with_rollback(
    root: str, folder: str, kill_after_s: float | None, strategy: str | None = None
) -> dict[str, Any]:
    """As ``attempt``; data step 13 is bad."""
    found = newest(Path(folder) / CHECKPOINTS) if (Path(folder) / CHECKPOINTS).is_dir() else None
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"said{os.environ.get('RANK', '0')}.jsonl").touch()
    duration = Duration()
    outcome = spiking.run(
        root,
        folder,
        poison=[13],
        rollback={},
        save_every=5,
        extra=[duration, *([] if kill_after_s is None else [KillLater(kill_after_s)])],
        plugins=[FolderCheckpointIO()],
        ckpt_path=None if found is None else str(found.path),
        strategy=strategy,
        replicas=None if strategy in (None, "zero3") else 1,
    )
    was_over = found is not None and found.facts.global_step == resumable.UPDATES
    return outcome | {"seconds": duration.seconds, "was_over": was_over}


def drill(*, runs: int, worlds: list[int], extras: list[str], seed: int, strategy: str | None = None) -> dict[str, Any]:
    """Figures of all drills, ready for JSON.

    Args:
        runs: Of each kind, on each number of ranks.
        worlds: Numbers of ranks.
        extras: ``damage``, ``disk`` and ``rollback``, or none.
        seed: Of the moments.
        strategy: Of ``LAYOUTS``; None for Lightning's own.
    """
    figures: dict[str, Any] = {}
    pool = RankPool()
    try:
        for world_size in worlds:
            with tempfile.TemporaryDirectory() as name:
                one = Drill(pool, world_size=world_size, folder=Path(name), seed=seed, strategy=strategy)
                for kind in ("kill", *extras):
                    if kind == "rollback":
                        folder = Path(name) / kind
                        one = RollbackDrill(pool, world_size=world_size, folder=folder, seed=seed, strategy=strategy)
                    layout = f", {strategy}" if strategy is not None else ""
                    figures[f"{kind}, {world_size} ranks{layout}"] = _series(one, kind, runs)
    finally:
        pool.close()
    return figures


def _series(one: Drill, kind: str, runs: int) -> dict[str, Any]:
    records = []
    for number in range(runs):
        run = one.folder / f"{kind}-{number}"
        if kind == "disk":
            records.append(one.fill_disk(run))
        else:
            records.append(one.finish(run, one.random.randint(1, 3), damage=kind == "damage"))
        shutil.rmtree(run, ignore_errors=True)
        said = "equal" if records[-1]["equal"] else records[-1]["wrong"]
        print(f"{kind}, {one.world_size} ranks, run {number + 1} of {runs}: {said}", file=sys.stderr, flush=True)
    return {
        "runs": runs,
        "equal": sum(record["equal"] for record in records),
        "stops": sum(record["kills"] for record in records),
        "in_a_save": sum(record["in a save"] for record in records),
        "damaged": sum(len(record["damaged"]) for record in records),
        "wrong": [record["wrong"] for record in records if record["wrong"]],
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<18}{'runs':>6}{'bit-equal':>11}{'stops':>7}{'in a save':>11}{'damaged':>9}"]
    for name, row in figures.items():
        counts = f"{row['runs']:>6}{row['equal']:>11}{row['stops']:>7}{row['in_a_save']:>11}{row['damaged']:>9}"
        lines.append(f"{name:<18}{counts}")
    return "\n".join(lines)


def main() -> int:
    """Run the drills that the command line names."""
    parser = argparse.ArgumentParser(description="Kill runs at random moments; resumed, they must end bit-equal.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--with", dest="extras", choices=["damage", "disk", "rollback"], nargs="*", default=[])
    parser.add_argument("--strategy", choices=list(LAYOUTS), help="of lit-pretrain, on 2 ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = drill(
        runs=arguments.runs,
        worlds=[2] if arguments.strategy is not None else arguments.worlds,
        extras=arguments.extras,
        seed=arguments.seed,
        strategy=arguments.strategy,
    )
    print(table(figures))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**circumstances(), "kill_drill": figures}, indent=2) + "\n")
    return 0 if all(row["equal"] == row["runs"] for row in figures.values()) else 1


if __name__ == "__main__":
    from benchmarks import kill_drill  # rank processes look for `attempt` by the module's real name

    sys.exit(kill_drill.main())
