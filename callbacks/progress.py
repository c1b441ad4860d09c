"""A progress bar over the whole run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lit_pretrain import units
from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._measuring.meter import StepMeter
from lit_pretrain.callbacks._measuring.tokens import TokensPerBatch, check_tokens_per_batch, tokens_in
from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError


class PretrainProgress(TQDMProgressBar):
    """Loss, tokens seen, tokens per second and the time left, over the updates of the run, not the batches of an epoch.

    On a terminal one bar, and a second one while validation runs. Elsewhere (a log file, a batch system) one plain line
    every ``interval_s`` seconds, one after each validation and one at the end.

    Args:
        interval_s: Seconds between plain lines.
        refresh_s: Seconds between two looks of the bar; the loss is read from the device then and only then.
        tokens_per_batch: As in ``ThroughputMonitor``.
        loss: Name of the logged loss; where nothing of that name is logged, what ``training_step`` returned.
        clock: Seconds, monotonic.
    """

    order: ClassVar[int] = Order.STATISTICS
    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(
        self,
        *,
        interval_s: float = 30.0,
        refresh_s: float = 0.5,
        tokens_per_batch: TokensPerBatch = None,
        loss: str = "train/loss",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        for name, value in (("interval_s", interval_s), ("refresh_s", refresh_s)):
            if value < 0:
                raise ConfigError(f"callbacks.progress.{name}={value} must be at least 0.")
        check_tokens_per_batch(tokens_per_batch, owner="progress")
        self.interval_s = interval_s
        self.refresh_s = refresh_s
        self.tokens_per_batch = tokens_per_batch
        self.loss = loss
        self.clock = clock
        self.tokens = 0.0
        self._knows_tokens = False
        self._meter = StepMeter(window=50, ignore=2, clock=clock)
        self._output: Any = None
        self._total: int | None = None
        self._first_update = 0
        self._began_s = 0.0
        self._shown_s = 0.0

    @property
    def plain(self) -> bool:
        """Whether lines are printed in place of a bar: standard output is no terminal."""
        return not sys.stdout.isatty()

    # The bars.

    def init_train_tqdm(self) -> Tqdm:
        """One bar for the run."""
        return _off() if self.plain else super().init_train_tqdm()

    def init_validation_tqdm(self) -> Tqdm:
        """A bar that goes away again."""
        return _off() if self.plain else super().init_validation_tqdm()

    def init_sanity_tqdm(self) -> Tqdm:
        """As for validation."""
        return _off() if self.plain else super().init_sanity_tqdm()

    def init_test_tqdm(self) -> Tqdm:
        """As for validation."""
        return _off() if self.plain else super().init_test_tqdm()

    def init_predict_tqdm(self) -> Tqdm:
        """As for validation."""
        return _off() if self.plain else super().init_predict_tqdm()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print beside the bar, or as a line of its own."""
        if self.plain:
            print(*args, sep=sep, flush=True, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    # The hooks.

    def on_train_start(self, *args: Any) -> None:
        """Find out how long the run is and show where it starts."""
        super().on_train_start(*args)
        trainer: Trainer = args[0]
        total = trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) and total > 0 else None
        self._first_update = trainer.global_step
        self._began_s = self._shown_s = self.clock()
        self._output = None
        bar = self.train_progress_bar
        bar.set_description("Training", refresh=False)
        bar.total, bar.initial, bar.n = self._total, self._first_update, self._first_update
        bar.refresh()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """The bar is the run's: an epoch changes nothing."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As above."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The wait for data is over."""
        self._meter.batch_start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Count; show when it is time to."""
        tokens = tokens_in(batch, trainer, self.tokens_per_batch)
        self._knows_tokens = tokens is not None
        self.tokens += tokens or 0.0
        self._meter.batch_end(tokens=tokens or 0.0, completes_update=not _compat.accumulates(trainer))
        self._output = outputs
        if self.is_disabled:
            return
        now = self.clock()
        if now - self._shown_s >= (self.interval_s if self.plain else self.refresh_s):
            self._shown_s = now
            self._show(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation does not slow training down in the figures."""
        self.pause_timing()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how it went."""
        super().on_validation_end(trainer, pl_module)
        if self.plain and self.is_enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")}
            said = ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.items()))
            self.print(f"validation at update {trainer.global_step}: {said or 'nothing was logged'}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nor does saving."""
        self.pause_timing()

    def on_train_end(self, *args: Any) -> None:
        """Show where it ended."""
        trainer, pl_module = args[0], args[1]
        if self.is_enabled:
            self._show(trainer, pl_module)
        self._output = None
        super().on_train_end(*args)

    def pause_timing(self) -> None:
        """Do not count what happens until the next training batch."""
        self._meter.pause()

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.tokens = state_dict["tokens"]

    # What is shown.

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Loss, tokens and speed, then what the module logs with ``prog_bar=True``."""
        items: dict[str, int | str | float | dict[str, float]] = {}
        loss = self._read_loss(trainer)
        if loss is not None:
            items["loss"] = f"{loss:.4g}"
        speed = self._meter.tokens_per_second
        if self._knows_tokens:
            items["tokens"] = units.count(self.tokens)
        if self._knows_tokens and speed is not None:
            items["tokens/s"] = units.count(speed)
        items |= {name: value for name, value in trainer.progress_bar_metrics.items() if name != self.loss}
        return items

    def _read_loss(self, trainer: Trainer) -> float | None:
        value = trainer.callback_metrics.get(self.loss)
        if value is not None:
            return float(value)
        value = self._output.get("loss") if isinstance(self._output, dict) else self._output
        # Under automatic optimization Lightning hands out the loss divided by the number of accumulated batches.
        scale = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        return None if value is None else float(value) * scale

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, items = trainer.global_step, self.get_metrics(trainer, pl_module)
        if not self.plain:
            bar = self.train_progress_bar
            if not bar.disable:
                bar.n = step
                bar.set_postfix(items)
            return
        place = f"update {step}" if self._total is None else f"update {step}/{self._total}"
        said = [
            place,
            *(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in items.items()
            ),
        ]
        done = step - self._first_update
        if self._total is not None and done > 0 and not trainer.should_stop:
            left = (self.clock() - self._began_s) / done * (self._total - step)
            said.append(f"{units.duration(left)} left")
        self.print(" | ".join(said))


def _off() -> Tqdm:
    return Tqdm(disable=True)
