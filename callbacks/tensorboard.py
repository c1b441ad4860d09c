"""Curves in TensorBoard that go on after a resume, and do not run back and forth."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks.exact_resume import ExactResume
from lit_pretrain.callbacks.order import Order


class TensorBoardContinuation(Callback):
    """Makes TensorBoard forget what a run logged between the checkpoint it goes on from and its death.

    TensorBoard drops all events of a run from step ``s`` on when it meets a session-start event with step ``s``. Its
    reader takes the first such event of a run for the run's beginning, so a new run gets one too. (Lightning writes
    curves through to the disk whenever it logs, so a killed process loses none that stand before its last checkpoint.)

    Works with every ``TensorBoardLogger`` of the trainer that logs into the same folder again (the same ``version``).
    Leave its ``purge_step`` alone.
    """

    order: ClassVar[int] = Order.RESUME + 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the first session."""
        if stage == "fit" and trainer.is_global_zero:
            for logger in _boards(trainer):
                _ = logger.experiment  # makes its file
                if len(list(Path(logger.log_dir).glob("*tfevents*"))) <= 1:
                    start_session(logger, step=0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a resume, open a session at the step that is logged next."""
        resume = next((c for c in trainer.callbacks if isinstance(c, ExactResume)), None)  # type: ignore[attr-defined]
        step = resume.resumed_at if resume is not None else None
        if step is None:
            step = loops.windows_closed(trainer)
        if step > 0:
            self.restart(trainer, step=step)

    def restart(self, trainer: Trainer, *, step: int) -> None:
        """Make TensorBoard forget everything from ``step`` on; for a rollback too."""
        if trainer.is_global_zero:
            for logger in _boards(trainer):
                start_session(logger, step=step)


def start_session(logger: TensorBoardLogger, *, step: int) -> None:
    """Write a session-start event: events of this run from ``step`` on that stand before it count no more."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # loads TensorBoard, which others are spared

    writer = logger.experiment.file_writer
    assert writer is not None
    writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
    writer.flush()


def _boards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
