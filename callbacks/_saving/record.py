"""What our callbacks tell the checkpoint plugin, inside Lightning's checkpoint dict."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lit_pretrain.callbacks._compat import loops
from lit_pretrain.plugins.checkpoint_dict import global_name

KEY = "lit_pretrain"
EXACT_KEY = "lit_pretrain_exact_resume"


def parameter_names(trainer: Trainer) -> list[list[list[str]]]:
    """Names of the parameters of each group of each optimizer, as the module calls them, without wrappers.

    Every rank calls it: where layers are spread over ranks, those of all are named.
    """
    of_all = getattr(trainer.strategy, "optimizer_parameter_names", lambda: None)()
    if of_all is not None:
        return [[[global_name(name) for name in group] for group in optimizer] for optimizer in of_all]
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters(remove_duplicate=True)}
    return [
        [[global_name(names.get(id(p), f"unnamed.{i}.{j}")) for j, p in enumerate(group["params"])]
         for i, group in enumerate(optimizer.param_groups)]
        for optimizer in trainer.optimizers
    ]  # fmt: skip


def write_names(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Say which parameter each optimizer state belongs to."""
    checkpoint.setdefault(KEY, {})["parameter_names"] = parameter_names(trainer)


def write_facts(trainer: Trainer, checkpoint: dict[str, Any], *, reason: str, monitors: dict[str, float]) -> None:
    """Say what the checkpoint is; the names are those of ``CheckpointFacts``."""
    write_names(trainer, checkpoint)
    exact = checkpoint.get(EXACT_KEY)
    at = loops.place(trainer)
    checkpoint[KEY]["facts"] = {
        "global_step": checkpoint["global_step"],
        "microbatches_read": at.batches[0] if exact is None else exact["batches"],
        "updates_read": at.windows if exact is None else exact["windows"],
        "reason": reason,
        "monitors": monitors,
        "ledger_length": _ledger_length(trainer),
    }


def _ledger_length(trainer: Trainer) -> int:
    """Jumps that the run has made over bad data."""
    return max((len(getattr(c, "ledger", ())) for c in trainer.callbacks), default=0)  # type: ignore[attr-defined]
