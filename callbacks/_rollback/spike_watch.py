"""The loss of every update, seen alike by all ranks, before a detector."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_pretrain.callbacks._lagging import LaggingMean
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import SpikeDetector, Verdict

_REMEMBERED = 64  # updates whose batches can be named


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One update as the detector saw it.

    Args:
        verdict: The detector's.
        loss: Mean over all ranks.
        grad_norm: Before clipping; None where nobody measures it.
    """

    verdict: Verdict
    loss: float
    grad_norm: float | None


class SpikeWatch:
    """Sums the losses of a window, averages them over ranks and shows them to the detector, late but alike.

    Args:
        detector: Judges.
        monitor: Name of a logged value to watch; None watches what ``training_step`` returns.
    """

    def __init__(self, detector: SpikeDetector, *, monitor: str | None) -> None:
        self.detector = detector
        self.monitor = monitor
        self._mean: LaggingMean | None = None
        self._loss: Tensor | None = None
        self._waiting: list[tuple[int, list[float]]] = []  # means that a checkpoint held
        self._batches: deque[tuple[int, list[Any]]] = deque(maxlen=_REMEMBERED)
        self._batch: list[Any] = []
        self._has_judged = False  # anything in this window

    def start(self, trainer: Trainer) -> None:
        """Every rank calls it when training starts."""
        self._mean = LaggingMean(trainer)
        self._loss, self._batch = None, []
        self._batches.clear()
        self._has_judged = False

    def note_batch(self, batch: Any, *, number: int) -> None:
        """Remember what a microbatch calls itself, its ``index``; ``number`` where it has no name."""
        index = batch.get("index") if isinstance(batch, Mapping) else None
        self._batch.append(number if index is None else index)

    def add(self, loss: Any) -> None:
        """Add a microbatch's share of the loss."""
        if isinstance(loss, Tensor):
            share = loss.detach().to(torch.float32 if loss.device.type == "mps" else torch.float64)
            self._loss = share if self._loss is None else self._loss + share

    def send(self, trainer: Trainer, *, update: int, norm: Tensor | None) -> None:
        """The window is over: start the way of its values to all ranks. Every rank calls it."""
        assert self._mean is not None
        self._batches.append((update, self._batch))
        loss = self._take(trainer)
        if loss is None:
            return
        known = loss.new_ones(()) if norm is not None else loss.new_zeros(())
        values = torch.stack([loss, norm.detach().to(loss) if norm is not None else loss.new_zeros(()), known])
        self._mean.send(update, values)

    @property
    def has_loss(self) -> bool:
        """Whether this window has something to judge that was not sent yet."""
        return self._loss is not None or (self.monitor is not None and not self._has_judged)

    def require_loss(self, trainer: Trainer) -> None:
        """At the end of a window that was applied.

        Raises:
            ConfigError: Nothing of it was sent.
        """
        judged, self._has_judged = self._has_judged, False
        if not judged:
            raise self._no_loss(trainer)

    def drop_window(self) -> None:
        """Forget the losses of a window that was not applied."""
        self._loss, self._batch, self._has_judged = None, [], False

    def _take(self, trainer: Trainer) -> Tensor | None:
        loss, self._loss, self._batch = self._loss, None, []
        self._has_judged = True
        if self.monitor is None:
            if loss is None:
                raise self._no_loss(trainer)
            return loss
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise ConfigError(
                f"rollback.monitor={self.monitor!r} is not among the logged values ({known}); log it in every "
                "training step, or leave monitor out to watch the loss."
            )
        return value.detach().to(torch.float64)

    def _no_loss(self, trainer: Trainer) -> ConfigError:
        return ConfigError(
            f"{type(trainer.lightning_module).__name__}.training_step returns no loss to watch; set rollback.monitor "
            "to a logged value."
        )

    def look(self, *, wait: bool, finite_only: bool = False) -> list[Seen]:
        """Judge what has arrived, or everything; ends with the first spike, and forgets what came after it.

        Every rank calls it with the same settings.

        Args:
            wait: For all that is on its way.
            finite_only: Pass over what is not finite: a loss scaler is about to skip that update.
        """
        assert self._mean is not None
        arrived, self._waiting = self._waiting, []
        arrived += self._mean.flush() if wait else self._mean.ready()
        seen = []
        for update, (loss, norm, is_known) in arrived:
            grad_norm = norm if is_known else None
            if finite_only and not (math.isfinite(loss) and math.isfinite(norm)):
                continue
            verdict = self.detector.observe(loss, step=update, grad_norm=grad_norm)
            seen.append(Seen(verdict=verdict, loss=loss, grad_norm=grad_norm))
            if verdict.is_spike:
                self._mean.flush()
                break
        return seen

    def indices(self, update: int) -> list[int]:
        """The batches of an update, by the names that they were noted under."""
        for known, batch in reversed(self._batches):  # an update may have been made before, and taken back
            if known == update:
                return [int(i) for index in batch for i in torch.as_tensor(index).flatten().tolist()]
        return []

    def close(self) -> None:
        """Leave nothing on its way to other ranks."""
        if self._mean is not None:
            self._mean.flush()

    def state_dict(self) -> dict[str, Any]:
        """The detector, and means that it has not seen. Every rank calls it."""
        if self._mean is not None:
            self._waiting += self._mean.flush()
        return {
            "detector": self.detector.state_dict(),
            "waiting": [[update, [float(v) for v in values]] for update, values in self._waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on."""
        self.detector.load_state_dict(state["detector"])
        self._waiting = [(int(update), list(values)) for update, values in state["waiting"]]

    def rewind(self, detector: Mapping[str, Any]) -> None:
        """Back to an earlier state of the detector; nothing is left that it has not seen."""
        self.detector.load_state_dict(detector)
        self._waiting = []
        self._loss, self._batch = None, []
