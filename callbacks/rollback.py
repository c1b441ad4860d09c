"""A run that takes a loss spike back by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat, _random
from lit_pretrain.callbacks._compat import averages, loops, rewind
from lit_pretrain.callbacks._compat.saying import say
from lit_pretrain.callbacks._everywhere import everywhere
from lit_pretrain.callbacks._rollback import spike_report
from lit_pretrain.callbacks._rollback.alarm import AlarmTarget
from lit_pretrain.callbacks._rollback.data_course import DataCourse
from lit_pretrain.callbacks._rollback.fetches import Fetches
from lit_pretrain.callbacks._rollback.lowered_rate import LoweredRate
from lit_pretrain.callbacks._rollback.moments import Moments
from lit_pretrain.callbacks._rollback.owners import check_owners, save_is_due
from lit_pretrain.callbacks._rollback.spike_watch import Seen, SpikeWatch
from lit_pretrain.callbacks._rollback.update_drop import UpdateDrop
from lit_pretrain.callbacks._saving.run_end import RunEnd
from lit_pretrain.callbacks.clipping import GradientClipping
from lit_pretrain.callbacks.order import Order, move_behind, move_to_place
from lit_pretrain.checks import path, whole
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import Decision, RollbackPolicy, SkipLedger, SpikeDetector, SpikeRule

Mode = Literal["rollback", "skip", "warn"]


class LossSpikeRollback(Callback):
    """Goes back to before a spike and on behind its data, without a stop and without anybody's help.

    Every ``every_n_steps`` updates it copies all that decides the next update (weights, masters, optimizer states,
    buffers, loss scale, schedules, random states, means that are being logged, Lightning's averages of weights) into
    memory, as this rank holds it, while training goes on. When the detector sees a spike, all ranks put the newest
    state from before it back, in place, and train on with the batches that follow the spike. Afterwards the run is, bit
    for bit, one that never read the batches in between. What was left out stands in the ledger, a file that is on the
    disk before training goes on: a run that is killed and resumed leaves out the same.

    The data never go back: batches and epochs count on. Tokens that count, updates,
    ``global_step`` and learning-rate schedules do go back. States of ``EarlyStopping`` do, and those of callbacks with
    ``rolls_back = True``. No validation follows a rollback before the next one is due.

    Whenever a checkpoint is written, older snapshots are given up: a run that resumes from it has none of them, and it
    has to act like one that went on.

    Ranks decide on means that are equal on all of them, an update later; only where a state is kept (a snapshot, a
    checkpoint, a validation) do they wait for them.

    Args:
        detector: ``robust``, ``mean``, a rule or a detector; see ``lit_pretrain.spikes``.
        mode: ``rollback``; ``skip`` drops the update before it is made (waits for the loss at every update; needs no
            snapshots, and cannot undo what came before); ``warn`` only tells.
        policy: How far back, how often, and with which learning rate.
        every_n_steps: Updates between snapshots.
        keep: Snapshots in memory; each as large as weights, masters, buffers and optimizer states of a rank.
        monitor: A logged value to watch; None watches the mean of what ``training_step`` returns.
        alarm: Told of every spike: a function, a command or a webhook; see ``Alarm``.
        ledger: The file of what was left out; None is ``spikes.jsonl`` in the trainer's ``default_root_dir``.
        disk: A folder on a local disk to hold the snapshots, in place of memory.

    Attributes:
        stop_reason: Why it ended the run; None when it did not.

    Raises:
        ConfigError: When a setting is impossible, at construction; before the first step where another callback would
            decide the same, or where the strategy keeps its states out of reach.
    """

    order: ClassVar[int] = Order.ROLLBACK

    def __init__(
        self,
        detector: SpikeDetector | SpikeRule | str = "robust",
        *,
        mode: Mode = "rollback",
        policy: RollbackPolicy | None = None,
        every_n_steps: int = 25,
        keep: int = 4,
        monitor: str | None = None,
        alarm: AlarmTarget = None,
        ledger: str | Path | None = None,
        disk: str | Path | None = None,
    ) -> None:
        if mode not in ("rollback", "skip", "warn"):
            raise ConfigError(f"rollback.mode={mode!r} is unknown; use rollback, skip or warn.")
        whole("rollback.every_n_steps", every_n_steps, least=1)
        whole("rollback.keep", keep, least=1, most=1000)
        for name, value in (("ledger", ledger), ("disk", disk)):
            path("rollback." + name, value)
        if monitor is not None and not isinstance(monitor, str):
            raise ConfigError(f"rollback.monitor={monitor!r} must be the name of a logged value, or null for the loss.")
        if policy is not None and not isinstance(policy, RollbackPolicy):
            raise ConfigError(f"rollback.policy={policy!r} must be a RollbackPolicy, or null for the default one.")
        if ledger is not None and Path(ledger).is_dir():
            raise ConfigError(f"rollback.ledger={str(ledger)!r} is a folder; name a file, such as spikes.jsonl in it.")
        self.mode = mode
        self.policy = policy if policy is not None else RollbackPolicy()
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.stop_reason: str | None = None
        self._watch = SpikeWatch(
            detector if isinstance(detector, SpikeDetector) else SpikeDetector(detector), monitor=monitor
        )
        self._reports = spike_report.SpikeReports(alarm)
        self._course = DataCourse(None if ledger is None else Path(ledger).expanduser())
        self._disk = None if disk is None else Path(disk).expanduser()
        self._end = RunEnd("rollback")
        self._updates = 0  # applied
        self._is_resumed = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._moments: Moments | None = None
        self._hooks: list[RemovableHandle] = []
        self._drop: UpdateDrop | None = None
        self._rate: LoweredRate | None = None
        self._clipping: GradientClipping | None = None
        self._applied = False  # the optimizer has changed the weights in this window
        self._fetches: Fetches | None = None
        self._windows: int | None = None  # under which the next update is logged, after going back

    @property
    def ledger(self) -> SkipLedger:
        """What was left out, and why."""
        return self._course.ledger

    @property
    def rollbacks(self) -> int:
        """How often it acted, over all resumes."""
        return len(self.ledger)

    @property
    def snapshot_bytes(self) -> int:
        """Memory that snapshots take on this rank, in bytes."""
        return 0 if self._moments is None else self._moments.size

    @property
    def in_doubt(self) -> bool:
        """Whether the last update may be the beginning of a spike."""
        return self.mode == "rollback" and self._watch.detector.is_suspicious

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second owner of the same decision; take the right place among the callbacks."""
        if stage != "fit":
            return
        self._begin_anew()
        check_owners(trainer, self, mode=self.mode)
        self._clipping = next((c for c in trainer.callbacks if isinstance(c, GradientClipping)), None)  # type: ignore[attr-defined]
        move_to_place(trainer, self)
        move_behind(trainer, self, averages.averaging(trainer))  # they take in what has been judged
        self._reports.setup(trainer)
        self._watch.detector.reset()
        self._course.forget()
        self.stop_reason = None
        self._updates, self._is_resumed = 0, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the ledger; listen to optimizers and batches."""
        self._watch.start(trainer)
        self._end.begin(trainer)
        self._reports.start(trainer)
        if not self._is_resumed:
            self._updates = trainer.global_step
        self._course.start(trainer, is_resumed=self._is_resumed)
        self._hooks = [
            o.register_step_post_hook(self._note_step) for o in trainer.optimizers if isinstance(o, Optimizer)
        ]
        self._rate = LoweredRate(trainer, lambda done: self.ledger.lr_factor(done), updates=lambda: self._updates)
        if self.mode == "rollback":
            folder = None if self._disk is None else self._disk / f"rank-{trainer.global_rank:05d}"
            everywhere(trainer, lambda: Moments.check(folder))
            self._moments = Moments(every_n_steps=self.every_n_steps, keep=self.keep, path=folder)
        elif self.mode == "skip":
            self._drop = UpdateDrop(trainer)
        self._fetches = Fetches(
            trainer, self._course, fetched=lambda: self._tell(trainer), only_warns=self.mode == "warn"
        )
        self._fetches.listen()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to this epoch's batches; the loaders may be others."""
        if self._fetches is not None:
            self._fetches.epoch_has_ended()
            self._fetches.listen()

    def _tell(self, trainer: Trainer) -> None:
        windows, self._windows = self._windows, None
        self._reports.log(trainer, windows=windows, rollbacks=self.rollbacks)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Where a window begins, take a snapshot if it is time."""
        self._tell(trainer)  # where fetches are out of reach
        self._watch.note_batch(batch, number=loops.batches_ready(trainer) - 1)
        if self._course.is_open:
            return
        self._course.is_open = True
        if self._drop is not None:
            self._drop.open_window(trainer)
        if self._moments is not None:
            seen = self._watch.detector.state_dict()
            self._moments.take_if_due(trainer, updates=self._updates, course=self._course, detector=seen)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The loss of the last microbatch is nowhere else yet when an update has to be dropped."""
        if self.mode == "skip":
            self._watch.add(loss.detach() / _compat.loss_scale(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Weights may change from here on: snapshots have to be complete, and a bad update has to be dropped."""
        if self._moments is not None:
            self._moments.wait()
        if self._drop is not None:
            if not self._watch.has_loss:  # a batch without one, or another step on the gradients of the last
                self._drop.drop_again(optimizer)
                return
            before = self._watch.detector.state_dict()
            self._watch.send(trainer, update=self._updates + 1, norm=self._norm)
            scaled = _compat.grad_scaler(trainer) is not None
            for seen in self._watch.look(wait=True, finite_only=scaled):
                if seen.verdict.is_spike:
                    self._drop.drop(optimizer)
                    self._act_by_dropping(trainer, seen)
                    self._watch.rewind(before)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a window, look at what the detector has to say."""
        if self.mode != "skip":
            self._watch.add(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        if _compat.accumulates(trainer):
            return
        self._course.end_window()
        applied, self._applied = self._applied, False
        if not applied:
            self._watch.drop_window()
            if self._drop is not None:
                self._windows = self._drop.take_back(trainer)
                if self._windows is not None:
                    self._went_back(self._drop.random, epoch=trainer.current_epoch)
            return
        self._updates += 1
        if self.mode == "skip":
            self._watch.require_loss(trainer)
            return
        self._watch.send(trainer, update=self._updates, norm=self._norm)
        self._look(trainer, wait=self._must_know(trainer))

    @property
    def _norm(self) -> Tensor | None:
        return None if self._clipping is None else self._clipping.norm

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._applied = self._applied or not _compat.step_was_skipped(optimizer)

    def _must_know(self, trainer: Trainer) -> bool:
        """Whether this state is kept or looked at, so that it has to be judged now."""
        if self._updates % self.every_n_steps == 0 or self._course.has_to_jump:
            return True
        over = loops.epoch_is_over(trainer) or loops.run_is_over(trainer)
        return over or loops.validation_is_due(trainer) or save_is_due(trainer)

    def before_save(self, trainer: Trainer) -> None:
        """Judge all updates made, and go back if one of them was a spike: what is saved next is good.

        Every rank calls it, at an update boundary.
        """
        if not self._course.is_open and self.mode != "skip":
            self._look(trainer, wait=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No validation on weights that were not judged, nor one that changes them while they are copied."""
        if self._moments is not None:
            self._moments.wait()
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.before_save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No epoch's end either."""
        self.before_save(trainer)
        if self._fetches is not None:
            self._fetches.epoch_ends()

    def _look(self, trainer: Trainer, *, wait: bool) -> None:
        for seen in self._watch.look(wait=wait):
            if seen.verdict.is_spike:
                self._act(trainer, seen)
                return
            if self._moments is not None:
                self._moments.confirm(seen.verdict)

    def _act(self, trainer: Trainer, seen: Seen) -> None:
        details = spike_report.origins(trainer, self._watch.indices(seen.verdict.step))
        moments = self._moments
        if moments is None:
            self._reports.announce(trainer, seen, details, action="nothing is done about it (mode=warn)")
            return
        decision = self.policy.roll_back(
            self.ledger,
            verdict=seen.verdict,
            snapshots=moments.points(),
            position=self._course.position,
            loss=seen.loss,
            grad_norm=seen.grad_norm,
        )
        if decision.skip is not None and decision.restore is not None:
            kept = moments.kept_by(decision.restore)
            self._course.enter(trainer, replace(decision.skip, details={**details, "snapshots": kept}))
        if decision.restore is not None:
            moment = moments.go_back(trainer, decision.restore)
            self._watch.rewind(moment.detector)
            self._updates = moment.point.step
            self._windows = moment.clock.windows
            self._went_back(moment.snapshot.random, epoch=moment.epoch)
        self._reports.announce(trainer, seen, details, action=spike_report.action(decision))
        self._stop_if(trainer, decision)

    def _went_back(self, random: _random.State, *, epoch: int) -> None:
        assert self._fetches is not None
        self._fetches.owe(random)
        self._fetches.went_back(epoch=epoch)

    def _act_by_dropping(self, trainer: Trainer, seen: Seen) -> None:
        details = spike_report.origins(trainer, self._watch.indices(seen.verdict.step))
        decision = self.policy.drop(
            self.ledger,
            verdict=seen.verdict,
            position=self._course.position + 1,
            loss=seen.loss,
            grad_norm=seen.grad_norm,
        )
        if decision.skip is not None:
            self._course.enter(trainer, replace(decision.skip, details=details))
        self._reports.announce(trainer, seen, details, action=spike_report.action(decision))
        self._stop_if(trainer, decision)

    def _stop_if(self, trainer: Trainer, decision: Decision) -> None:
        if decision.stop is not None:
            self.stop_reason = decision.stop
            self._end.stop(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """From here on the run is to act like one that resumes from this checkpoint."""
        if self._moments is not None:
            self._moments.note_save()

    def state_dict(self) -> dict[str, Any]:
        """Plain containers. Every rank calls it."""
        return {
            **self._watch.state_dict(),
            "ledger": self.ledger.state_dict(),
            "position": self._course.position,
            "updates": self._updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on; the file of the ledger is read when training starts."""
        self._watch.load_state_dict({key: state_dict[key] for key in ("detector", "waiting")})
        self._course.ledger = SkipLedger.from_state(state_dict["ledger"])
        self._course.position, self._updates = int(state_dict["position"]), int(state_dict["updates"])
        self._is_resumed = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say the last word to the loggers; save, if nobody else does; give the memory back."""
        self._tell(trainer)
        if self.stop_reason is not None:
            say(f"LossSpikeRollback has ended the run: {self.stop_reason}")
            self._end.save(trainer, reason=self.stop_reason)
        self._watch.close()
        self._close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the memory back."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end.close(trainer)
        if self._rate is not None:
            self._rate.close()
        if self._moments is not None:
            self._moments.close()
            self._moments = None
        if self._fetches is not None:
            self._fetches.epoch_has_ended()
        rewind.stop_listening(trainer)
        self._reports.close()
