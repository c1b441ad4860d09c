"""What is known of a spike, for the ledger, the loggers and the alarm."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._rollback.spike_watch import Seen
from lit_pretrain.callbacks.tensorboard import TensorBoardContinuation
from lit_pretrain.specs import BatchOrigins
from lit_pretrain.spikes import Decision

_MOST_ROWS = 32  # rows of a batch that the ledger describes


def origins(trainer: Trainer, indices: list[int]) -> dict[str, Any]:
    """The batch's indices and, where the data module knows, the documents in it; plain containers.

    Args:
        trainer: Its data module is asked.
        indices: What the batches called themselves.
    """
    details: dict[str, Any] = {"batches": indices}
    datamodule = getattr(trainer, "datamodule", None)
    if indices and isinstance(datamodule, BatchOrigins):
        rows = datamodule.origins(indices[0])
        details["rows"] = len(rows)
        details["documents"] = rows[:_MOST_ROWS]
    return details


def facts(seen: Seen, *, action: str, details: dict[str, Any]) -> dict[str, Any]:
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


def log(trainer: Trainer, seen: Seen, *, rollbacks: int, text: str) -> None:
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


def as_text(details: dict[str, Any], *, reason: str, action: str) -> str:
    """Markdown for TensorBoard."""
    lines = [reason, "", f"**{action}**", ""]
    if details.get("batches"):
        lines.append(f"Batches: {', '.join(map(str, details['batches']))}")
    for row in details.get("documents", []):
        place = f"{row.get('source')}, {row.get('file')}, token {row.get('offset')}"
        lines.append(f"- {place}: `{str(row.get('text', ''))[:80]!r}`")
    return "\n".join(lines)


def continuation(trainer: Trainer) -> TensorBoardContinuation:
    """The trainer's, or one that has only us to serve; call it in ``setup``, before anything is logged."""
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
        return f"the update is dropped, with data position {skip.low}"
    cut = "" if skip.lr_factor == 1.0 else f", learning rate x {skip.lr_factor:g} until update {skip.until}"
    return f"back to update {skip.step}, on with data position {skip.high} in place of {skip.low}{cut}"
