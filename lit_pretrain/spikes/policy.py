"""How far back a rollback goes, what it skips, and when it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_pretrain.checks import number, whole
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes.ledger import Skip, SkipLedger
from lit_pretrain.spikes.verdict import Verdict

_FURTHEST = 1_000_000  # updates; more data than any run would give up


@dataclass(frozen=True, order=True)
class SnapshotPoint:
    """A state that can be restored.

    Args:
        step: Applied updates in it.
        position: The data position that follows.
    """

    step: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about a spike.

    Args:
        restore: The snapshot to go back to; None restores nothing.
        skip: The ledger's new entry; None when the run stops.
        stop: Why the run has to end, one sentence; None lets it go on.
    """

    restore: SnapshotPoint | None = None
    skip: Skip | None = None
    stop: str | None = None


@dataclass(frozen=True, kw_only=True)
class RollbackPolicy:
    """Back behind the spike's beginning, on behind its data; further each time that this does not help.

    The first rollback of a stretch restores the newest snapshot from before the spike and skips the data from there
    to the spike. The second goes ``distance`` updates further back and skips ``distance`` updates' data more, the
    third ``distance * growth``, and so on. (PaLM went back about 100 updates and skipped 200 to 500 batches.)

    Args:
        max_rollbacks: In one stretch; the next spike stops the run.
        max_rollbacks_in_all: In the run, over all requeues.
        stretch: Spikes at most so many updates apart belong to one stretch.
        distance: Updates that the second rollback of a stretch goes further, both ways.
        growth: Factor on the distance from one rollback to the next.
        lr_factor: On the learning rate after a rollback, 1 for none; cuts of one stretch multiply.
        lr_updates: Updates that the cut lasts; None lasts to the update that spiked.

    Raises:
        ConfigError: When a setting is impossible.

    Source: Chowdhery et al. 2022 (PaLM), section 5.1.
    """

    max_rollbacks: int = 3
    max_rollbacks_in_all: int = 20
    stretch: int = 200
    distance: int = 25
    growth: float = 2.0
    lr_factor: float = 1.0
    lr_updates: int | None = None

    def __post_init__(self) -> None:
        whole("rollback.max_rollbacks", self.max_rollbacks, least=0)
        whole("rollback.max_rollbacks_in_all", self.max_rollbacks_in_all, least=0)
        whole("rollback.stretch", self.stretch, least=1)
        whole("rollback.distance", self.distance, least=0, most=_FURTHEST)
        number("rollback.growth", self.growth, least=1.0)
        if self.growth > 10.0:
            raise ConfigError(f"rollback.growth={self.growth} must be at most 10; 2 doubles the distance each time.")
        number("rollback.lr_factor", self.lr_factor, above=0.0)
        if self.lr_factor > 1.0:
            raise ConfigError(f"rollback.lr_factor={self.lr_factor} must be at most 1; 1 leaves the rate alone.")
        if self.lr_updates is not None:
            whole("rollback.lr_updates", self.lr_updates, least=1)
            if self.lr_factor == 1.0:
                raise ConfigError(
                    f"rollback.lr_updates={self.lr_updates} has no effect with rollback.lr_factor=1; set a factor "
                    "below 1."
                )

    def in_stretch(self, ledger: SkipLedger, spike: int) -> int:
        """How many entries belong to the stretch in which update ``spike`` spikes."""
        count = 0
        for entry in reversed(ledger.entries):
            if spike - entry.spike > self.stretch:
                break
            count, spike = count + 1, entry.spike
        return count

    def further(self, attempt: int) -> int:
        """Updates that attempt 1, 2, 3 ... of a stretch goes further than need be: 0, d, d g, d g^2 ..."""
        return 0 if attempt <= 1 else round(min(self.distance * self.growth ** min(attempt - 2, 100), _FURTHEST))

    def roll_back(
        self,
        ledger: SkipLedger,
        *,
        verdict: Verdict,
        snapshots: Sequence[SnapshotPoint],
        position: int,
        positions_per_update: int = 1,
        loss: float | None = None,
        grad_norm: float | None = None,
    ) -> Decision:
        """Which snapshot to restore and what data to skip.

        Args:
            ledger: The run's.
            verdict: The spike.
            snapshots: Those whose weights have given an accepted loss, in any order.
            position: The data position that follows the last update made, at an update's boundary.
            positions_per_update: Data positions that one update takes.
            loss: Of the update that spiked, for the ledger.
            grad_norm: Likewise.
        """
        ranked = sorted(snapshots)
        if not ranked:
            return Decision(
                stop=f"{verdict.reason} There is no snapshot to go back to yet, so training stops; lower the learning "
                "rate or lengthen the warmup."
            )
        # The weights before update `began` are those after began - 1 updates.
        safe = [point for point in ranked if point.step < verdict.began] or ranked[:1]
        attempt = 1 + self.in_stretch(ledger, verdict.step)
        stop = self._enough(ledger, verdict, attempt)
        if stop is not None:
            return Decision(
                restore=safe[-1],
                stop=f"{stop} Update {safe[-1].step} is restored and training stops; lower the learning rate, or look "
                f"at the data from position {safe[-1].position} to {position}.",
            )
        further = self.further(attempt)
        far = [point for point in safe if point.step < verdict.began - further] or safe[:1]
        to = far[-1]
        until = 0
        if self.lr_factor < 1.0:
            until = verdict.step if self.lr_updates is None else to.step + self.lr_updates
        skip = Skip(
            step=to.step,
            low=to.position,
            high=position + further * positions_per_update,
            spike=verdict.step,
            kind=verdict.kind,
            loss=loss,
            grad_norm=grad_norm,
            z=verdict.z,
            lr_factor=self.lr_factor,
            until=until,
            reason=verdict.reason,
        )
        return Decision(restore=to, skip=skip)

    def drop(
        self,
        ledger: SkipLedger,
        *,
        verdict: Verdict,
        position: int,
        positions_per_update: int = 1,
        loss: float | None = None,
        grad_norm: float | None = None,
    ) -> Decision:
        """Leave out the update about to be made: its data is skipped, and nothing has to be restored.

        Args:
            ledger: The run's.
            verdict: The spike, at update ``step``: ``step - 1`` updates are applied and stay so.
            position: The data position behind that update's data.
            positions_per_update: Data positions that one update takes.
            loss: Of the update that spiked, for the ledger.
            grad_norm: Likewise.
        """
        stop = self._enough(ledger, verdict, 1 + self.in_stretch(ledger, verdict.step))
        if stop is not None:
            return Decision(
                stop=f"{stop} Training stops; lower the learning rate, or look at the data before {position}."
            )
        skip = Skip(
            step=verdict.step - 1,
            low=position - positions_per_update,
            high=position,
            spike=verdict.step,
            kind=verdict.kind,
            loss=loss,
            grad_norm=grad_norm,
            z=verdict.z,
            reason=verdict.reason,
        )
        return Decision(skip=skip)

    def _enough(self, ledger: SkipLedger, verdict: Verdict, attempt: int) -> str | None:
        if attempt > self.max_rollbacks:
            return (
                f"{verdict.reason} That is spike {attempt} within stretches of {self.stretch} updates, and "
                f"rollback.max_rollbacks={self.max_rollbacks}."
            )
        if len(ledger) >= self.max_rollbacks_in_all:
            return (
                f"{verdict.reason} That is spike {len(ledger) + 1} of the run, and "
                f"rollback.max_rollbacks_in_all={self.max_rollbacks_in_all}."
            )
        return None
