"""How much data and work went into a run, over all its resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._measuring.tokens import TokenCount, TokensPerBatch, check_tokens_per_batch, tokens_in
from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError


class RunCounters(Callback):
    """Three counts that are never mixed, each in the checkpoint.

    - ``tokens``: those that made the weights what they are. An update that was dropped does not count, and a rollback
      takes its tokens back.
    - ``tokens_read``: the position in the data. It never goes back.
    - ``seconds``, ``device_seconds`` and ``flops``: work done. They never go back either; only what a process did
      after its last checkpoint is lost with it.

    All of them stand at an update boundary: a window that is not finished has not been counted. In a run that goes on
    from a checkpoint without counts, earlier updates are taken to have used as many tokens as those to come, aloud, or
    none where only a function knows; their time is not known.

    Args:
        tokens_per_batch: Tokens of one rank's batch, or a function of the batch, whose numbers are added up over the
            data-parallel ranks after every update; None asks the data module's ``tokens_per_update``. Without either,
            tokens are not counted.
        clock: Seconds, monotonic.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(
        self, *, tokens_per_batch: TokensPerBatch = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        check_tokens_per_batch(tokens_per_batch, owner="counters")
        if not callable(clock):
            raise ConfigError(f"counters.clock={clock!r} must be a function that gives seconds.")
        self.tokens_per_batch = tokens_per_batch
        self.tokens = 0.0
        self.tokens_read = 0.0
        self.updates = 0
        self.seconds = 0.0
        self.device_seconds = 0.0
        self.flops = 0.0
        self._clock = clock
        self._count: TokenCount | None = None
        self._left_out: TokenCount | None = None  # made where something is left out
        self._applied = False
        self._since = 0.0
        self._flops_per_token = 0.0
        self._is_restored = False
        self._hooks: list[RemovableHandle] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new run starts at 0; a checkpoint is read after this."""
        if stage == "fit":
            self.tokens = self.tokens_read = self.seconds = self.device_seconds = self.flops = 0.0
            self.updates = 0
            self._is_restored = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._count, self._left_out = TokenCount(trainer, self.tokens_per_batch), None
        self._applied, self._since = False, self._clock()
        flops: Any = getattr(pl_module, "flops_per_token", None)
        self._flops_per_token = float(flops() if callable(flops) else flops or 0.0)
        if trainer.global_step > 0 and not self._is_restored:
            self._assume(trainer)
        self._hooks = [o.register_step_post_hook(self._note) for o in trainer.optimizers if isinstance(o, Optimizer)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a window when it is over."""
        assert self._count is not None
        self._count.add(batch)
        if _compat.accumulates(trainer):
            return
        window = self._count.take()
        self.tokens_read += window
        self.flops += window * self._flops_per_token
        if self._applied:
            self.tokens += window
            self.updates += 1
        self._applied = False
        self._add_time(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is work, too."""
        if not trainer.sanity_checking and self._hooks:
            self._add_time(trainer)

    def rewind(self, *, updates: int, tokens: float) -> None:
        """Take back what a rollback undid; what was read and spent stays.

        At the end of a window's last batch this counts for that window too, whether it is counted by then or not.
        """
        self.updates, self.tokens = updates, tokens
        self._applied = False

    def leave_out(self, trainer: Trainer, batch: Any) -> None:
        """A microbatch was read and not trained on."""
        if self._left_out is None:
            self._left_out = TokenCount(trainer, self.tokens_per_batch)
        self._left_out.add(batch)
        self.tokens_read += self._left_out.take()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting."""
        self._add_time(trainer)
        self._unhook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._unhook()

    def state_dict(self) -> dict[str, Any]:
        """All counts."""
        return {
            "tokens": self.tokens,
            "tokens_read": self.tokens_read,
            "updates": self.updates,
            "seconds": self.seconds,
            "device_seconds": self.device_seconds,
            "flops": self.flops,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        for name, value in state_dict.items():
            setattr(self, name, value)
        self._is_restored = True

    def _assume(self, trainer: Trainer) -> None:
        """Count the updates of before, which nobody has counted."""
        self.updates = trainer.global_step
        if callable(self.tokens_per_batch):
            rank_zero_warn(
                f"The checkpoint holds no state of RunCounters, and tokens_per_batch is a function: the tokens of its "
                f"{self.updates} updates are not known and left out, as is their time; give a number to count them."
            )
        else:
            rank_zero_warn(
                f"The checkpoint holds no state of RunCounters: its {self.updates} updates are counted as if each had "
                "used the tokens of one to come, and their time is left out."
            )
            per_batch = tokens_in(None, trainer, self.tokens_per_batch) or 0.0
            self.tokens = self.tokens_read = per_batch * trainer.accumulate_grad_batches * self.updates
        self.flops = self.tokens_read * self._flops_per_token

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._applied = self._applied or not _compat.step_was_skipped(optimizer)

    def _add_time(self, trainer: Trainer) -> None:
        now = self._clock()
        self.seconds += now - self._since
        self.device_seconds += (now - self._since) * trainer.world_size
        self._since = now

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
