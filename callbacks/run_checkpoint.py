"""When a run saves, which checkpoints stay, and which is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._agreement import Agreement
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._saving import keeping, saves
from lit_pretrain.callbacks._saving.record import write_facts
from lit_pretrain.callbacks.exact_resume import ExactResume
from lit_pretrain.callbacks.order import in_doubt, settle
from lit_pretrain.errors import ConfigError, Preempted

FOLDER = "checkpoints"
_PATIENCE = timedelta(seconds=10)  # with ranks that were not interrupted and will not answer
_MINUTES, _FAILED = "minutes", "a save failed"


class RunCheckpoint(Checkpoint):
    """Saves at update boundaries, after the validation and the epoch's end that are due there.

    Checkpoints are named by the update (``step-00000250``). What a resumed run needs is in each of them; with
    ``ExactResume`` among the callbacks it goes on exactly. In place of ``ModelCheckpoint``: ``best_model_path`` and
    ``last_model_path`` are there, and ``ckpt_path="best"`` works; ``"last"`` does not, as Lightning asks only its own
    callback for it: pass the folder that ``lit_pretrain.distributed.checkpoint.newest(dirpath)`` finds.

    A save by interval waits while ``LossSpikeRollback`` suspects the last update: an update or two, as many as its rule
    takes to be sure.

    A save that fails ends the run on every rank: at once, or at the next boundary when it ran in the background.

    Args:
        dirpath: Where to save; None is ``checkpoints`` in the trainer's ``default_root_dir``.
        every_n_steps: Save after every so many updates.
        every_minutes: Save when so many minutes have passed since the last time, by the clock of rank 0. Both may be
            given; with neither, only the other reasons save.
        keep_last: So many of the newest stay.
        keep_every: Those whose update is a multiple of this stay for good.
        monitor: A logged metric that says which checkpoint is the best.
        mode: ``min`` or ``max``.
        save_best: Save whenever a validation finds a better value than ever; the best one stays.
        save_at_end: Save the end of the run.
        save_on_exception: Save when an exception or Ctrl-C ends the run, if the weights are whole and all ranks stand
            at the same update. Never after a ``FloatingPointError``: those weights are not worth it.

    Raises:
        ConfigError: When a setting is impossible, at construction.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_best: bool = True,
        save_at_end: bool = True,
        save_on_exception: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"callbacks.checkpoint.{name}={value} must be at least 1.")
        if every_minutes is not None and not every_minutes > 0:
            raise ConfigError(f"callbacks.checkpoint.every_minutes={every_minutes} must be above 0.")
        if mode not in ("min", "max"):
            raise ConfigError(f"callbacks.checkpoint.mode={mode!r} must be min or max.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.monitor = monitor
        self.mode = mode
        self.save_best = save_best and monitor is not None
        self.save_at_end = save_at_end
        self.save_on_exception = save_on_exception
        self.agreement: Agreement | None = None
        self._clock = clock
        self._best: str | None = None  # names of checkpoints, not paths: a run folder may be moved
        self._best_score: float | None = None
        self._last: str | None = None
        self._saved_at: int | None = None
        self._folder = Path()
        self._reset()

    def _reset(self) -> None:
        self._due = False  # at the end of this update
        self._due_at = 0  # the update at which that was found
        self._better = False
        self._reason = "manual"  # of a save that somebody else asks for
        self._in_window = False
        self._saved_time = self._clock()
        self._group: Any = None
        self._missed = False

    # ---------------------------------------------------------------- what others ask

    @property
    def best_model_path(self) -> str:
        """The checkpoint with the best value of ``monitor``; empty when there is none."""
        return "" if self._best is None else str(self._folder / self._best)

    @property
    def best_model_score(self) -> float | None:
        """The best value of ``monitor``."""
        return self._best_score

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint that this run has saved; empty when there is none."""
        return "" if self._last is None else str(self._folder / self._last)

    def save(self, trainer: Trainer, *, reason: str) -> Path:
        """Save now, unless this update is saved already. Every rank calls it, at an update boundary.

        Args:
            trainer: In a hook of training or validation.
            reason: ``interval``, ``end``, ``preemption``, ``exception`` or ``best``.

        Returns:
            The checkpoint. Under a plugin that saves in the background it may not be complete yet.

        Raises:
            ConfigError: On every rank, when it could not be written, or the one before in the background.
        """
        if not self._in_window:
            settle(trainer)
        step = trainer.global_step
        if self._saved_at == step and self._last is not None:
            return self._folder / self._last
        name = f"step-{step:08d}{_compat.checkpoint_suffix(trainer)}"
        before = self._saved_at, self._last, self._best
        # The checkpoint holds this state, so it is set before.
        self._saved_at, self._last, self._due, self._reason = step, name, False, reason
        if self._better:
            self._best, self._better = name, False
        try:
            saves.save(trainer, self._folder / name)
        except BaseException:
            self._saved_at, self._last, self._best = before
            raise
        finally:
            self._reason = "manual"
        self._saved_time = self._clock()
        self._prune(trainer)
        return self._folder / name

    # ---------------------------------------------------------------- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fix the folder, the same on every rank.

        Raises:
            ConfigError: On every rank, when nothing could be written there.
        """
        folder = self.dirpath if self.dirpath is not None else Path(trainer.default_root_dir) / FOLDER
        folder = folder.expanduser().absolute()
        will_save = stage == "fit" and not _compat.is_debugging(trainer)
        place, problem = trainer.strategy.broadcast((str(folder), keeping.problem_with(folder) if will_save else ""))
        if problem:
            raise ConfigError(f"callbacks.checkpoint.dirpath={place}: {problem}; name another folder.")
        self._folder = Path(place)
        if stage == "fit":
            self._reset()
            _compat.begin_saving(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock.

        Raises:
            ConfigError: On every rank, when a run that begins would write over the checkpoints of an earlier one.
        """
        if trainer.global_step == 0 and not _compat.is_debugging(trainer):
            problem = trainer.strategy.broadcast(keeping.earlier(self._folder) if trainer.is_global_zero else "")
            if problem:
                raise ConfigError(f"callbacks.checkpoint.dirpath={self._folder}: {problem}; name another folder.")
        self._saved_time = self._clock()
        self.agreement = Agreement.of(trainer)
        self.agreement.ask(_FAILED, lambda: int(_compat.save_has_failed(trainer)))
        if self.every_minutes is not None:
            self.agreement.ask(_MINUTES, lambda: int(trainer.is_global_zero and self._time_is_up()))
        if self.save_on_exception and trainer.world_size > 1 and dist.is_initialized():
            # A group with patience of its own: monitored_barrier hands its timeout to rank 0 alone.
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A window begins or goes on."""
        self._in_window = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, unless something else is due at this update first."""
        if _compat.accumulates(trainer):
            return
        self._in_window = False
        step = trainer.global_step
        if self._agreed(trainer, _FAILED):
            saves.wait(trainer)  # raises what rank 0 knows
        if self._agreed(trainer, _MINUTES):
            # The answer is one update old: right after a save it still says that it is time. Ask rank 0 again.
            self._find_due(step, bool(trainer.strategy.broadcast(self._time_is_up())))
        if self.every_n_steps is not None and step % self.every_n_steps == 0 and step != self._saved_at:
            self._find_due(step, True)
        if self._due and not loops.validation_is_due(trainer) and not loops.epoch_is_over(trainer):
            self._save_if_due(trainer, "interval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the new value; save what is due."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        reason = "interval" if self._due else "best"
        if self.monitor is not None and self._improved(trainer):
            self._better = True
            self._find_due(trainer.global_step, self.save_best)
        if self._due and not loops.epoch_is_over(trainer):
            self._save_if_due(trainer, reason)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what waited for the epoch's end."""
        if self._due:
            self._save_if_due(trainer, "best" if self._better else "interval")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end."""
        if self.save_at_end and not _compat.is_debugging(trainer) and trainer.global_step > 0:
            self.save(trainer, reason="end")
        saves.wait(trainer)
        if self.agreement is not None:
            self.agreement.close()
        self.agreement = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what there is, if it is whole on every rank."""
        hopeless = isinstance(exception, (Preempted, FloatingPointError, ConfigError))
        try:
            if self.save_on_exception and not hopeless and self._can_save_now(trainer):
                path = self.save(trainer, reason="exception")
                saves.wait(trainer)
                rank_zero_info(f"Saved {path} after {type(exception).__name__}.")
        except Exception as error:  # the first exception is the one that matters
            rank_zero_warn(f"Nothing could be saved after {type(exception).__name__}: {error}")
        finally:
            self.agreement = None  # what is on its way may wait for a rank that has gone
            saves.settle(trainer)

    # ---------------------------------------------------------------- state

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say what the checkpoint is: names of parameters, position in the data, the reason."""
        value = trainer.callback_metrics.get(self.monitor) if self.monitor is not None else None
        monitors = {} if value is None or self.monitor is None else {self.monitor: float(value)}
        write_facts(trainer, checkpoint, reason=self._reason, monitors=monitors)

    def state_dict(self) -> dict[str, Any]:
        """Names, not paths."""
        return {
            "best": self._best,
            "best_score": self._best_score,
            "last": self._last,
            "saved_at": self._saved_at,
            "monitor": self.monitor,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the best so far, if it is the same metric."""
        self._last, self._saved_at = state_dict["last"], state_dict["saved_at"]
        if state_dict["monitor"] == self.monitor:
            self._best, self._best_score = state_dict["best"], state_dict["best_score"]

    # ---------------------------------------------------------------- the work

    def _find_due(self, step: int, is_due: bool, /) -> None:
        if is_due and not self._due:
            self._due, self._due_at = True, step

    def _save_if_due(self, trainer: Trainer, reason: str) -> None:
        if not self._in_window and not _compat.is_debugging(trainer):
            settle(trainer)
        if trainer.global_step < self._due_at:
            # That update was taken back. A resumed run knows so and will not make it: it must not save here either.
            self._due = False
        elif reason == "interval" and in_doubt(trainer):
            return  # due at the next boundary: a spike that has just begun may be taken back by then
        elif not _compat.is_debugging(trainer):
            self.save(trainer, reason=reason)
        self._due = False

    def _agreed(self, trainer: Trainer, question: str) -> bool:
        if self.agreement is None:
            return False
        return bool(self.agreement.at_update(question, step=loops.batches_ready(trainer)))

    def _time_is_up(self) -> bool:
        return self.every_minutes is not None and self._clock() - self._saved_time >= 60 * self.every_minutes

    def _improved(self, trainer: Trainer) -> bool:
        assert self.monitor is not None
        value = trainer.callback_metrics.get(self.monitor)
        if value is None and not self._missed:
            self._missed = True
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            rank_zero_warn(
                f"callbacks.checkpoint.monitor={self.monitor!r} is not among the logged metrics ({known}); there will "
                "be no best checkpoint."
            )
        # Rank 0 decides: a metric that was not reduced differs by rank.
        score: float = trainer.strategy.broadcast(math.nan if value is None else float(value))
        if math.isnan(score):
            return False
        best = self._best_score
        better = best is None or (score < best if self.mode == "min" else score > best)
        if better:
            self._best_score = score
        return better

    def _can_save_now(self, trainer: Trainer) -> bool:
        """Agreed by all ranks, or False when one of them does not answer."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or _compat.is_debugging(trainer):
            return False
        resume = next((c for c in trainer.callbacks if isinstance(c, ExactResume)), None)  # type: ignore[attr-defined]
        whole = resume.can_save(trainer) if resume is not None else not self._in_window
        batches, step = resume.place_of_next_save(trainer) if resume is not None else (0, trainer.global_step)
        mine = (whole and step > 0 and step != self._saved_at, batches, step)
        if self._group is None:
            return mine[0]
        try:
            dist.monitored_barrier(self._group, timeout=_PATIENCE)
        except RuntimeError:
            rank_zero_info("Nothing was saved: not all ranks were interrupted.")
            return False
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, mine, group=self._group)
        return mine[0] and all(other == mine for other in everyone)

    def _prune(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            keep = {name for name in (self._best, self._last) if name is not None}
            keeping.prune(self._folder, trainer, keep_last=self.keep_last, keep_every=self.keep_every, keep=keep)
