"""What is known of a spike, for the ledger, the loggers and the alarm."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._compat.saying import say
from lit_pretrain.callbacks._rollback.alarm import Alarm, AlarmTarget
from lit_pretrain.callbacks._rollback.spike_watch import Seen
from lit_pretrain.callbacks.tensorboard import TensorBoardContinuation
from lit_pretrain.specs import BatchOrigins
from lit_pretrain.spikes import Decision

_MOST_ROWS = 32  # rows of a batch that the ledger describes


def origins(trainer: Trainer, indices: list[int]) -> dict[str, Any]:
    """The batch's indices and, where the data module knows, the documents in it; plain containers.

    Args:
        trainer: Its data module is asked.
        indices: Of the batches.
    """
    details: dict[str, Any] = {"batches": indices}
    datamodule = getattr(trainer, "datamodule", None)
    if indices and isinstance(datamodule, BatchOrigins):
        rows = datamodule.origins(indices[0])
        details["rows"] = len(rows)
        details["documents"] = rows[:_MOST_ROWS]
    return details


def _facts(seen: Seen, *, action: str, details: dict[str, Any]) -> dict[str, Any]:
    """For the alarm."""
    verdict = seen.verdict
    return {
        "update": verdict.step,
        "kind": verdict.kind,
        "loss": seen.loss,
        "grad_norm": seen.grad_norm,
        "z": verdict.z,
        "reason": verdict.reason,
        "action": action,
        **details,
    }


class SpikeReports:
    """Tells of spikes: the user and the alarm at once, the loggers when the next window begins.

    Args:
        alarm: See ``Alarm``.
    """

    def __init__(self, alarm: AlarmTarget) -> None:
        self._alarm = Alarm(alarm)
        self._curves = TensorBoardContinuation()
        self._to_log: list[tuple[Seen, str]] = []

    def setup(self, trainer: Trainer) -> None:
        """Before anything is logged."""
        self._curves, self._to_log = _continuation(trainer), []

    def start(self, trainer: Trainer) -> None:
        """When training starts."""
        if self._curves not in trainer.callbacks:  # type: ignore[attr-defined]
            self._curves.on_train_start(trainer, trainer.lightning_module)

    def announce(self, trainer: Trainer, seen: Seen, details: dict[str, Any], *, action: str) -> None:
        """Tell whom one can tell now."""
        self._to_log.append((seen, _as_text(details, reason=seen.verdict.reason, action=action)))
        say(f"Spike: {seen.verdict.reason} {action[:1].upper()}{action[1:]}.")
        if trainer.is_global_zero:
            self._alarm(_facts(seen, action=action, details=details))

    def log(self, trainer: Trainer, *, windows: int | None, rollbacks: int) -> None:
        """Turn the loggers back, and name the spikes there.

        Args:
            trainer: Between two updates.
            windows: Updates under which the next is logged, after going back; None where there was none.
            rollbacks: So far.
        """
        if windows is not None:
            loops.set_windows_closed(trainer, windows)
            self._curves.restart(trainer, step=windows)
        for seen, text in self._to_log:
            _log(trainer, seen, rollbacks=rollbacks, text=text)
        self._to_log = []

    def close(self) -> None:
        """Wait for the alarm."""
        self._alarm.close()


def _log(trainer: Trainer, seen: Seen, *, rollbacks: int, text: str) -> None:
    """Name the spike in every logger, between two batches: figures as scalars, the whole as text in TensorBoard."""
    figures = {"spike/rollbacks": float(rollbacks), "spike/update": float(seen.verdict.step)}
    for name, value in (("loss", seen.loss), ("grad_norm", seen.grad_norm), ("z", seen.verdict.z)):
        if value is not None and abs(value) < float("inf"):  # False for NaN
            figures[f"spike/{name}"] = value
    _compat.log(trainer, figures)
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                step = loops.windows_closed(trainer)
                logger.experiment.add_text("spike", text, global_step=step)


def _as_text(details: dict[str, Any], *, reason: str, action: str) -> str:
    """Markdown for TensorBoard."""
    lines = [reason, "", f"**{action}**", ""]
    if details.get("batches"):
        lines.append(f"Batches: {', '.join(map(str, details['batches']))}")
    for row in details.get("documents", []):
        place = f"{row.get('source')}, {row.get('file')}, token {row.get('offset')}"
        lines.append(f"- {place}: `{str(row.get('text', ''))[:80]!r}`")
    return "\n".join(lines)


def _continuation(trainer: Trainer) -> TensorBoardContinuation:
    """The trainer's, or one that has only us to serve."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TensorBoardContinuation):
            return callback
    ours = TensorBoardContinuation()
    ours.setup(trainer, trainer.lightning_module, "fit")
    return ours


def action(decision: Decision) -> str:
    """What is done about a spike, in words."""
    if decision.stop is not None:
        return "training stops"
    assert decision.skip is not None
    skip = decision.skip
    if decision.restore is None:
        return f"the update is dropped, and its data ({_updates(skip.low, skip.high)})"
    cut = "" if skip.lr_factor == 1.0 else f", learning rate x {skip.lr_factor:g} until update {skip.until}"
    return f"back to update {skip.step}, leaving out {_updates(skip.low, skip.high)} of the data{cut}"


def _updates(low: int, high: int) -> str:
    """Data positions, which count global batches from 0 as they are read."""
    return f"global batch {low}" if high == low + 1 else f"global batches {low} to {high - 1}"
