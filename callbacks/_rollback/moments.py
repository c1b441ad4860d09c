"""The snapshots of a run: when one is taken, which of them can be trusted, which are given up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_pretrain.callbacks._rollback.data_course import DataCourse
from lit_pretrain.callbacks._rollback.moment import Moment
from lit_pretrain.callbacks._rollback.snapshot import Ring
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import SnapshotPoint, Verdict


class Moments:
    """Taken where a window begins: at training's start, every so many updates, after a checkpoint, after a jump.

    Args:
        every_n_steps: Updates.
        keep: At most so many.
        path: A folder for them; None is memory.
    """

    def __init__(self, *, every_n_steps: int, keep: int, path: Path | None) -> None:
        self.every_n_steps = every_n_steps
        self._ring = Ring(keep=keep, path=path)
        self._is_saved = True

    @property
    def size(self) -> int:
        """Bytes on this rank."""
        return self._ring.size

    @staticmethod
    def check(path: Path | None) -> None:
        """Make the folder, and see whether something can be written there.

        Raises:
            ConfigError: It cannot.
        """
        if path is None:
            return
        trial = path / "trial.bin"
        try:
            path.mkdir(parents=True, exist_ok=True)
            trial.write_bytes(b"0")
            trial.unlink()
        except OSError as error:
            raise ConfigError(
                f"rollback.disk: snapshots cannot be written to {path} ({error.strerror or error}); name a folder on a "
                "local disk, or leave it out to keep them in memory."
            ) from error

    def note_save(self) -> None:
        """A checkpoint is being written: a run that resumes from it has no older snapshot, and this one is not to."""
        self._is_saved = True

    def take_if_due(self, trainer: Trainer, *, updates: int, course: DataCourse, detector: Mapping[str, Any]) -> None:
        """At the start of a window, before anything of it is done.

        Args:
            trainer: In training.
            updates: Applied so far.
            course: Of the data, in this window.
            detector: State of the spike detector, which has seen all of these updates.
        """
        taken, jumped = self._ring.taken, course.jumped_from is not None
        if not (self._is_saved or jumped or not taken or updates % self.every_n_steps == 0):
            return
        if self._is_saved:
            self._ring.drop(lambda moment: True)
            self._is_saved = False
        if not self._ring.taken or self._ring.taken[-1].point.step != updates:  # else a rollback has just led here
            point = SnapshotPoint(updates, course.start_of_window)
            self._ring.take(trainer, lambda snapshot: Moment.of(trainer, snapshot, point=point, detector=detector))
        jump = course.jump_at(updates) if jumped else None
        if jump is not None:  # made again: only the snapshots that the rollback left
            left = dict(jump.details.get("snapshots", []))
            self._ring.drop(lambda moment: moment.point.step not in left)
            for moment in self._ring.taken:
                moment.is_confirmed = bool(left[moment.point.step])

    def wait(self) -> None:
        """Before weights change: what is being copied has to be complete."""
        self._ring.copier.wait()

    def confirm(self, verdict: Verdict) -> None:
        """An accepted loss speaks for the weights it came from: those of the update before it, and all earlier ones."""
        for moment in self._ring.taken:
            moment.is_confirmed |= verdict.is_accepted and moment.point.step < verdict.step

    def points(self) -> list[SnapshotPoint]:
        """Those that can be trusted; if there are none, all."""
        return [m.point for m in self._ring.taken if m.is_confirmed] or [m.point for m in self._ring.taken]

    def kept_by(self, point: SnapshotPoint) -> list[list[Any]]:
        """What going back to ``point`` leaves, for the ledger: updates, and whether they are confirmed."""
        return [[m.point.step, m.is_confirmed] for m in self._ring.taken if m.point.step <= point.step]

    def go_back(self, trainer: Trainer, point: SnapshotPoint) -> Moment:
        """Restore it and give up what came later."""
        self._ring.drop(lambda moment: moment.point.step > point.step)
        moment: Moment = next(m for m in self._ring.taken if m.point == point)
        moment.restore(trainer, self._ring.copier)
        return moment

    def close(self) -> None:
        """Give the memory back."""
        self._ring.close()
