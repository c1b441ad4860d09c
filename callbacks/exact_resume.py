"""A run that goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat, _random
from lit_pretrain.callbacks._compat import loops, sums
from lit_pretrain.callbacks._compat.loops import Epoch, Place
from lit_pretrain.callbacks._resuming import names, stopping
from lit_pretrain.callbacks._resuming.muted import MutedWarning
from lit_pretrain.callbacks._resuming.replay import EpochReplay
from lit_pretrain.callbacks._saving.record import EXACT_KEY, KEY, parameter_names, write_names
from lit_pretrain.callbacks.order import Order, move_to_front
from lit_pretrain.plugins import match_parameters


class ExactResume(Callback):
    """Makes every checkpoint of a run one from which it goes on exactly.

    Whoever saves, and in whichever hook: the checkpoint stands at the boundary between two updates, holds the random
    state of every rank (python, numpy, torch), and says whether a validation or the end of an epoch is still owed.
    Saved in the middle of an accumulation window, it stands at the window's start, since the weights are still those.
    On resume no batch is repeated or lost, no validation is added or left out, and losses and weights are those of the
    run that was never stopped, bit for bit.

    Validation leaves no trace in the random state: training draws the same numbers with and without it.

    Means over an epoch (``log(..., on_epoch=True)``) go on with what was summed up before the stop. A torchmetrics
    object that a module keeps to itself until the epoch's end is saved by Lightning, if made ``persistent(True)``.

    What the user sets now wins over the checkpoint: the ``patience`` of an EarlyStopping.

    A model that was saved inside a wrapper (``torch.compile``) is loaded into one without it, and the other way round.

    Another number of ranks goes on too; its random numbers (dropout) are then others, and the data module has to know
    how to divide the same global batches (``TokenDataModule`` does).

    Loaders without a ``state_dict`` (an ordinary ``DataLoader``) are read again up to the place, under the random
    state with which the epoch began: as exact as the data set, and as slow as reading it. What cannot be exact is said
    in a warning: a data set without an order of its own, a stateful loader without a length, other ranks under a
    foreign loader.

    Not exact, in the epoch in which a run is resumed: ``GradientAccumulationScheduler``, and a ``DataLoader`` with a
    ``generator`` of its own. Nor ``ReduceLROnPlateau`` after a save in ``on_train_epoch_end``, behind which it steps.

    A module that changes its state in its own ``on_train_batch_end`` does so after callbacks have saved, as under
    Lightning alone.

    Args:
        replay: Read loaders without a state again up to the place; False starts the epoch's data anew, as Lightning
            does.
    """

    order: ClassVar[int] = Order.RESUME

    def __init__(self, *, replay: bool = True) -> None:
        self.replay = replay
        self._reset()

    def _reset(self) -> None:
        self._open = False  # in an accumulation window whose update is not made
        self._stepped = False  # the optimizer ran, though the window is not over
        self._fresh = False  # an epoch has begun and read nothing
        self._validated = False  # since the last update
        self._start: Place | None = None  # of the window
        self._start_random: _random.State = {}
        self._start_loaders: list[Any] = []
        self._start_sums: sums.Sums = {}
        self._sums_at_stop: sums.Sums | None = None  # Lightning ends the epoch wherever a run stops
        self._versions: list[int] = []
        self._before_validation: _random.State | None = None
        self._before_inner_validation: dict[str, Any] = {}  # states of callbacks, by their keys
        self._replay = EpochReplay()
        # What a checkpoint said, until it is used.
        self._restored: dict[str, Any] | None = None
        self._states: list[_random.State] = []
        self._to_restore: _random.State | None = None
        self._windows_to_restore: int | None = None
        self._ended_on_resume = False
        self._hooks: list[RemovableHandle | MutedWarning] = []
        self._patiences: list[tuple[EarlyStopping, int]] = []
        self._checkpoint: dict[str, Any] | None = None
        self._optimizers_exist = False

    # ---------------------------------------------------------------- saving

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring the checkpoint to an update boundary. Every rank calls it."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not loops.has_begun(trainer):
            return
        saved = checkpoint["loops"]["fit_loop"]
        if self._open and not self._stepped and self._start is not None:
            at, mine, epoch, owes = self._start, self._start_random, Epoch.RUNNING, False
            sums_of_epoch = self._start_sums
            loops.write_place(saved, at, epoch=epoch, fresh=at.batches[1] == 0)
            loops.set_loader_states(saved, self._start_loaders)
            checkpoint["global_step"] = at.steps[0]
            checkpoint.get("callbacks", {}).update(self._before_inner_validation)
        else:
            at, epoch = self._closed_place(trainer), self._epoch(trainer)
            owes = epoch is not Epoch.ENDED and not self._fresh and self._owes_validation(trainer)
            mine = self._random_after_validation() if owes else self._to_restore or _random.capture()
            sums_of_epoch = {} if epoch is Epoch.ENDED else self._sums(trainer)
            loops.write_place(saved, at, epoch=epoch, fresh=self._fresh)
        own = {"random": mine, "epoch": self._replay.state_dict(trainer), "sums": sums.plain(sums_of_epoch)}
        gathered = _gather(own, trainer)
        write_names(trainer, checkpoint)
        checkpoint[KEY]["rng"] = [rank["random"] for rank in gathered]
        checkpoint[EXACT_KEY] = {
            "version": 1,
            "windows": at.windows,
            "batches": at.batches[0],
            "owes_validation": owes,
            "epoch": epoch.value,
            "world_size": trainer.world_size,
            "metrics": _plain_metrics(trainer),
            "epochs_random": [rank["epoch"] for rank in gathered],
            "sums": [rank["sums"] for rank in gathered],
        }

    def _sums(self, trainer: Trainer) -> sums.Sums:
        return sums.capture(trainer) if self._sums_at_stop is None else self._sums_at_stop

    def _closed_place(self, trainer: Trainer) -> Place:
        if self._start is not None:
            return loops.place(trainer, windows=self._start.windows + 1)
        return loops.place(trainer, windows=self._restored["windows"] if self._restored else None)

    def _epoch(self, trainer: Trainer) -> Epoch:
        untouched = self._start is None and not self._fresh
        if untouched and self._restored is not None and self._restored["epoch"] == Epoch.ENDED.value:
            return Epoch.ENDED
        return loops.epoch(trainer, fresh=self._fresh)

    def _owes_validation(self, trainer: Trainer) -> bool:
        if self._validated:
            return False
        if self._start is None:
            return self._restored is not None and bool(self._restored["owes_validation"])
        return trainer.validating or loops.validation_is_due(trainer)

    def _random_after_validation(self) -> _random.State:
        return self._before_validation if self._before_validation is not None else _random.capture()

    def can_save(self, trainer: Trainer) -> bool:
        """Whether a checkpoint of this moment would be whole: False while an optimizer is changing weights."""
        if not self._open:
            return True
        return not self._stepped and self._versions == _compat.versions(trainer)

    def rewind(self, *, windows: int) -> None:
        """The weights went back to an earlier update, in the hook of this window's end; no validation follows.

        Args:
            windows: The step under which the next update is logged.
        """
        if self._start is not None:
            self._start = replace(self._start, windows=windows - 1)
        self._validated, self._before_validation = True, None

    def note_iterator(self) -> None:
        """Somebody has set the random state from which this epoch's iterator is made next."""
        self._replay.iterator_starts()

    @property
    def random_owed(self) -> _random.State | None:
        """The checkpoint's random state of this rank, until the next step begins with it; None at other times."""
        return self._to_restore

    @property
    def resumed_at(self) -> int | None:
        """The step under which a resumed run logs its next update; None for a run that began in this process."""
        return None if self._restored is None else int(self._restored["windows"])

    def place_of_next_save(self, trainer: Trainer) -> tuple[int, int]:
        """Microbatches read and optimizer steps done, as a checkpoint of this moment would say."""
        at = self._start if self._open and self._start is not None else loops.place(trainer)
        return at.batches[0], at.steps[0]

    # ---------------------------------------------------------------- resuming

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; stand first among the callbacks; note what the user has set."""
        self._unhook()
        if stage == "fit":
            self._reset()
            move_to_front(trainer, self)
            self._patiences = stopping.patiences(trainer)
        self._hooks.append(names.accept_wrappers(pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing on the module."""
        self._unhook()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what the checkpoint says until the loops are restored."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._restored = checkpoint.get(EXACT_KEY)
        self._states = checkpoint.get(KEY, {}).get("rng", [])
        self._checkpoint = checkpoint
        if self._optimizers_exist:
            self._match_optimizers(trainer)
        if self._restored is None or not self._states:
            self._restored = None
            rank_zero_warn(
                "The checkpoint was written without ExactResume: it holds no random states, and Lightning restarts "
                "where it can. The run goes on, but not as it would have without the stop."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sort the optimizer states by name. The loaders' first iterator is made after this, before any other hook."""
        self._replay.before_iterator()
        self._optimizers_exist = True
        self._match_optimizers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lead the restored loops to the right place."""
        self._hooks += [
            o.register_step_post_hook(self._note_step) for o in trainer.optimizers if isinstance(o, Optimizer)
        ]
        self._keep_loader_states(trainer)
        restored = self._restored
        if restored is None:
            return
        self._to_restore = _random.of_rank(self._states, rank=trainer.global_rank)
        self._windows_to_restore = restored["windows"]
        owes, epoch = restored["owes_validation"], Epoch(restored["epoch"])
        ending = epoch is Epoch.ENDING
        loops.lead_restart(trainer, windows=restored["windows"], owes_validation=owes, ending=ending)
        self._ended_on_resume = ending
        self._before_validation = self._to_restore if owes else None
        _restore_metrics(trainer, restored["metrics"])
        stopping.resume(trainer, self._patiences)
        loops.note_saved(trainer)
        if restored["world_size"] != trainer.world_size:
            rank_zero_warn(
                f"Resuming on {trainer.world_size} ranks what {restored['world_size']} saved: random numbers (dropout) "
                "are others from here on, and means over this epoch leave out what was logged before."
            )
        elif epoch is not Epoch.ENDED and restored.get("sums"):
            sums.restore(trainer, pl_module, restored["sums"][trainer.global_rank])
        self._replay.next_iterator_follows_epoch_start()
        if self.replay:  # Lightning cannot know that the place is found again
            self._hooks.append(MutedWarning(r"(?s).*your dataloader is not resumable", PossibleUserWarning))
        if epoch is Epoch.RUNNING:
            self._replay.resume(
                trainer,
                restored["epochs_random"],
                same_ranks=restored["world_size"] == trainer.world_size,
                wanted=self.replay,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new epoch: its iterator is made next."""
        if self._ended_on_resume:
            loops.end_restart(trainer)
            self._ended_on_resume = False
        self._fresh, self._validated = True, False
        resumes_here = self._to_restore is not None  # saved after the last epoch's end
        if resumes_here:
            self._restore_random()
        self._replay.epoch_starts(trainer)
        if resumes_here:
            loops.reopen(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the random state at the last moment before a step; note where a window starts."""
        if self._to_restore is not None:
            self._restore_random()
        if self._windows_to_restore is not None:
            loops.set_windows_closed(trainer, self._windows_to_restore)
            self._windows_to_restore = None
        if self._open:
            return
        self._open, self._stepped, self._fresh, self._sums_at_stop = True, False, False, None
        self._before_inner_validation = {}
        self._start = loops.place(trainer, unread=1)
        self._start_random = _random.capture()
        self._start_sums = sums.capture(trainer)
        self._versions = _compat.versions(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the window after its last batch."""
        self._before_validation = _random.capture()  # a callback behind this one may end the run, which validates
        if _compat.accumulates(trainer):
            return
        self._open = self._stepped = self._validated = False
        self._keep_loader_states(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation inside a window is run again by a run that goes on from the window's start.

        Whatever it makes callbacks believe (EarlyStopping counts it) must not be in the checkpoint then.
        """
        if self._open and not trainer.sanity_checking and not self._before_inner_validation:
            watching = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
            states = {c.state_key: deepcopy(c.state_dict()) for c in watching}
            self._before_inner_validation = {key: state for key, state in states.items() if state}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on with the random state it had."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validated = True
        if self._before_validation is not None:
            _random.restore(self._before_validation)
            self._before_validation = self._to_restore = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end of an epoch that was owed, or of a run that stops in the middle of one."""
        if self._to_restore is not None:
            self._restore_random()
        if not loops.epoch_is_over(trainer):
            self._sums_at_stop = sums.capture(trainer)
        if self._restored is not None:
            loops.end_epoch_as_ever(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop listening to the optimizers."""
        self._unhook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop listening to the optimizers."""
        self._unhook()

    def _match_optimizers(self, trainer: Trainer) -> None:
        """Lightning hands optimizer states out by position; parameters may have been put into other groups since.

        It restores callbacks before the optimizers exist, or after, as the strategy wants; the states always later.
        """
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None or "parameter_names" not in checkpoint.get(KEY, {}):
            return
        names = parameter_names(trainer)
        if names != checkpoint[KEY]["parameter_names"]:
            checkpoint["optimizer_states"] = match_parameters(checkpoint, names)

    def _restore_random(self) -> None:
        assert self._to_restore is not None
        _random.restore(self._to_restore)
        self._to_restore = None

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._open

    def _keep_loader_states(self, trainer: Trainer) -> None:
        """At the start of a step a loader's own state has already moved on."""
        self._start_loaders = loops.loader_states(trainer)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _gather(mine: dict[str, Any], trainer: Trainer) -> list[dict[str, Any]]:
    """What every rank has, on every rank, in order."""
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def _plain_metrics(trainer: Trainer) -> dict[str, list[Any]]:
    """Logged values by name, each with its type: callbacks that watch one find it after a resume."""
    return {
        name: [value.item(), str(value.dtype).removeprefix("torch.")]
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1
    }


def _restore_metrics(trainer: Trainer, metrics: dict[str, list[Any]]) -> None:
    device = trainer.strategy.root_device
    trainer.callback_metrics.update(
        {name: torch.tensor(v, dtype=getattr(torch, dtype), device=device) for name, (v, dtype) in metrics.items()}
    )
