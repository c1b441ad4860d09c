"""A signal ends the run at the next update, saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._agreement import Agreement
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._saving import saves, slurm
from lit_pretrain.callbacks.order import Order, move_to_end, settle
from lit_pretrain.callbacks.run_checkpoint import FOLDER, RunCheckpoint
from lit_pretrain.errors import ConfigError, Preempted

_QUESTION = "preemption"


class PreemptionCheckpoint(Callback):
    """On SIGTERM or SIGUSR1 to any one rank: one checkpoint at the next update boundary, then a stop on all ranks.

    The handler sets a flag and does nothing else, so a signal may come in the middle of a step, a validation or a save.
    The ranks agree on it through one asynchronous reduce per update, read one update later; nobody waits. After the
    save, ``Preempted`` (a ``SystemExit`` with code 75) leaves ``Trainer.fit`` on every rank. More signals change
    nothing. A signal that arrives when the last update is done is ignored: the run is about to end by itself.

    While the run trains, Lightning's own handlers are out of work: they call collectives from inside the handler,
    which hangs when not every rank gets the signal, and need a broadcast at every microbatch. The handlers of before
    ``Trainer.fit`` are back when it returns.

    Saves through ``RunCheckpoint`` where there is one, else into the folder of ``ModelCheckpoint``, else into
    ``dirpath``. Use it with ``ExactResume``.

    Under SLURM, rank 0 calls ``scontrol requeue`` after the save when the signal was one of ``requeue_signals``.
    SIGTERM is not among them: ``scancel`` sends it too. Have ``#SBATCH --signal=USR1@90`` in the job.

    Args:
        dirpath: Where to save when nobody else does; None is ``checkpoints`` in the trainer's ``default_root_dir``.
        signals: Names of the signals to hear.
        requeue: Put a SLURM job back into the queue.
        requeue_signals: Names of the signals for which to do so.

    Attributes:
        preempted_at: Update of the save; None while there was none.

    Raises:
        ConfigError: For a name that is no signal of this system, at construction.
    """

    order: ClassVar[int] = Order.SAVE_MARK

    def __init__(
        self,
        *,
        dirpath: str | Path | None = None,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        requeue: bool = True,
        requeue_signals: Sequence[str] = ("SIGUSR1",),
    ) -> None:
        for name in (*signals, *requeue_signals):
            if not hasattr(signal, name) or name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(
                    f"callbacks.preemption.signals={name!r} cannot be handled here; use names such as SIGTERM."
                )
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.signals = tuple(signals)
        self.requeue = requeue
        self.requeue_signals = tuple(requeue_signals)
        self.preempted_at: int | None = None
        self.agreement: Agreement | None = None
        self._received = 0  # number of the signal

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand behind everyone whose state a checkpoint holds."""
        if stage == "fit":
            self.preempted_at, self._received = None, 0
            move_to_end(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals; Lightning has just set its own handlers."""
        self.agreement = Agreement.of(trainer)
        self.agreement.ask(_QUESTION, lambda: self._received)
        _compat.silence_sigterm_broadcast(trainer)
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("PreemptionCheckpoint hears no signals: only the main thread can, and this is another one.")
            return
        for name in self.signals:
            # Lightning puts back whatever was there before fit, in every case, when it tears down.
            signal.signal(getattr(signal, name), self._note)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop if a rank had a signal by the last update."""
        if _compat.accumulates(trainer) or self.agreement is None:
            return
        received = self.agreement.at_update(_QUESTION, step=loops.batches_ready(trainer))
        if received and not loops.run_is_over(trainer):
            self._stop(trainer, received)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if a rank had a signal while validating, which may take long: here all ranks wait for each other."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not fitting or self.agreement is None or _compat.accumulates(trainer):
            return
        received = self.agreement.now(_QUESTION)
        if received and not loops.run_is_over(trainer):
            self._stop(trainer, received)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing on its way to other ranks."""
        if self.agreement is not None:
            self.agreement.close()
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the handlers to Lightning's teardown."""
        self._end(trainer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def _stop(self, trainer: Trainer, received: int) -> None:
        name = signal.Signals(received).name
        settle(trainer)
        path = self._save(trainer)
        saves.wait(trainer)
        trainer.strategy.barrier("preemption")  # a requeue kills every rank
        self.preempted_at = trainer.global_step
        requeued = False
        if self.requeue and name in self.requeue_signals and trainer.is_global_zero:
            requeued = slurm.requeue()
        preempted = Preempted(signal=name, step=trainer.global_step, checkpoint=str(path), requeued=requeued)
        rank_zero_info(str(preempted))
        raise preempted

    def _save(self, trainer: Trainer) -> Path:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunCheckpoint):
                return callback.save(trainer, reason="preemption")
        theirs = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
        folder = self.dirpath or Path(theirs[0] if theirs else Path(trainer.default_root_dir) / FOLDER)
        path = folder / f"step-{trainer.global_step:08d}{_compat.checkpoint_suffix(trainer)}"
        path = Path(trainer.strategy.broadcast(str(path.absolute())))
        saves.save(trainer, path)
        return path

    def _end(self, trainer: Trainer) -> None:
        self.agreement = None
        _compat.restore_sigterm_broadcast(trainer)
