"""What a plan was made of, so that a resumed run cannot go on with another one unnoticed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from lit_pretrain.corpus import BatchPlan, SkipList, WeightSchedule
from lit_pretrain.errors import ConfigError

_VERSION = 1
_FIXED = ("seed", "sequence_length", "global_batch_size", "isolate_documents", "sources")


@dataclass(frozen=True, kw_only=True)
class PlanIdentity:
    """Everything that decides the batches.

    Args:
        seed: Of the orders.
        sequence_length: Tokens per row.
        global_batch_size: Rows per update.
        isolate_documents: Whether targets across documents are ignored.
        sources: Per source its tokens and the hash of what made it.
        windows: Windows per source, in order.
        weights: The schedule as plain containers; may change for the future only.
        skip: Skipped stretches; may change for the future only.
        accumulation: Microbatches per update.
    """

    seed: int
    sequence_length: int
    global_batch_size: int
    isolate_documents: bool
    sources: dict[str, dict[str, Any]]
    windows: dict[str, int]
    weights: list[Any]
    skip: list[list[int]]
    accumulation: int

    def state_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {"version": _VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PlanIdentity:
        """Undo ``state_dict``."""
        if state.get("version") != _VERSION:
            raise ConfigError(
                f"The checkpoint's data plan has version {state.get('version')!r}, this release reads {_VERSION}; "
                "resume with the release that wrote it."
            )
        return cls(**{key: value for key, value in state.items() if key != "version"})

    def check_same(self, now: PlanIdentity) -> None:
        """Raises ConfigError, naming what differs, unless ``now`` reads the same batches from the same text."""
        differing = [name for name in _FIXED if getattr(self, name) != getattr(now, name)]
        if not differing:
            return
        what = "; ".join(f"data.{name} was {getattr(self, name)}, is {getattr(now, name)}" for name in differing)
        raise ConfigError(f"The checkpoint was trained on another data plan: {what}. Restore them, or begin a new run.")

    def check_past(self, now: PlanIdentity, *, updates: int) -> None:
        """Raises ConfigError when changed weights or skips would have changed what was already read.

        Args:
            now: The plan to go on with.
            updates: Updates already read.
        """
        if updates == 0:
            return
        old, new = SkipList(self.skip), SkipList(now.skip)
        if old.data_step(updates - 1) != new.data_step(updates - 1):
            raise ConfigError(
                f"data.skip was {self.skip}, is {now.skip}: it differs before update {updates}, where this run "
                "resumes; add entries only from there on."
            )
        if self.weights == now.weights:
            return
        step = old.data_step(updates - 1) + 1
        if self._plan().epochs(step) != now._plan().epochs(step):
            raise ConfigError(
                f"data.weights was {self.weights}, is {now.weights}: it differs before data step {step}, where this "
                "run resumes, so samples would be lost or repeated; keep the old points and add new ones from there on."
            )

    def _plan(self) -> BatchPlan:
        (unit,), *points = self.weights
        return BatchPlan(
            self.windows,
            global_batch_size=self.global_batch_size,
            tokens_per_row=self.sequence_length,
            weights=WeightSchedule(points, unit=unit),
            seed=self.seed,
        )
