"""What a run has skipped, and what follows from it: data positions, learning rates, valid checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lit_pretrain.checks import number, whole
from lit_pretrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Skip:
    """At update ``step`` the data jumps from ``low`` to ``high``.

    Args:
        step: Applied updates at the jump: those of the restored snapshot.
        low: First data position that is not trained on; positions count what the data module delivers.
        high: First data position that is trained on again.
        spike: The update that spiked.
        kind: The verdict's.
        loss: Of that update; None where it was not known.
        grad_norm: Likewise.
        z: The verdict's.
        lr_factor: On the learning rate of updates made while ``step`` to ``until - 1`` updates are applied.
        until: Applied updates at which the factor ends.
        reason: One sentence.
        details: Plain containers for people: documents in the stretch, batch indices.

    Raises:
        ConfigError: When positions, updates or the factor are impossible.
    """

    step: int
    low: int
    high: int
    spike: int
    kind: str
    loss: float | None = None
    grad_norm: float | None = None
    z: float | None = None
    lr_factor: float = 1.0
    until: int = 0
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step", "low", "spike", "until"):
            whole(f"skip.{name}", getattr(self, name), least=0)
        whole("skip.high", self.high, least=self.low + 1)
        number("skip.lr_factor", self.lr_factor, above=0.0)

    def to_json(self) -> str:
        """One line, strict JSON: numbers that are not finite become text."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("loss", "grad_norm", "z"):
            if plain[name] is not None and not math.isfinite(plain[name]):
                plain[name] = str(float(plain[name]))
        return json.dumps(plain, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Skip:
        """The entry of a line.

        Raises:
            DataError: The line is none of ours.
        """
        try:
            plain = json.loads(line)
            if not isinstance(plain, dict):
                raise ValueError("an entry is an object in braces")
            for name in ("loss", "grad_norm", "z"):
                plain[name] = None if plain.get(name) is None else float(plain[name])
            entry = cls(**plain)
            if not (isinstance(entry.kind, str) and isinstance(entry.reason, str)):
                raise ValueError("kind and reason have to be text")
            _check_snapshots(entry.details)
            return entry
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a ConfigError is a ValueError
            raise DataError(f"{line[:80]!r} is no entry of a skip ledger ({error}).") from error


def _check_snapshots(details: object) -> None:
    if not isinstance(details, Mapping):
        raise ValueError("details is no mapping")
    for pair in details.get("snapshots", []):
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], bool)):
            raise ValueError("details.snapshots holds no pairs of an update and true or false")


class SkipLedger:
    """Every jump of a run, in the order in which they were made. It never changes; ``added`` gives a longer one.

    The entries are keyed by data position and update, so a run that resumes from an older checkpoint makes the same
    jumps at the same updates.

    Args:
        entries: The jumps.
    """

    def __init__(self, entries: Sequence[Skip] = ()) -> None:
        self.entries = tuple(entries)
        merged: list[tuple[int, int]] = []
        for low, high in sorted((entry.low, entry.high) for entry in self.entries):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        self.ranges = tuple(merged)

    def __eq__(self, other: object) -> bool:
        # As text: a NaN loss equals itself there.
        return isinstance(other, SkipLedger) and self.state_dict() == other.state_dict()

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __len__(self) -> int:
        return len(self.entries)

    def added(self, entry: Skip) -> SkipLedger:
        """This ledger and one more jump."""
        return SkipLedger((*self.entries, entry))

    def next_position(self, position: int) -> int:
        """The first data position from ``position`` on that may be delivered."""
        for low, high in self.ranges:
            if position < low:
                break
            position = max(position, high)
        return position

    def skipped_before(self, position: int) -> int:
        """Data positions under ``position`` that were not trained on."""
        return sum(max(0, min(high, position) - low) for low, high in self.ranges)

    def lr_factor(self, applied_updates: int) -> float:
        """On the learning rate of the update made now: the product of the factors in force.

        It is a function of the update alone, so no restored schedule can undo it.
        """
        return math.prod(e.lr_factor for e in self.entries if e.step <= applied_updates < e.until)

    def accepts(self, *, position: int, length: int) -> bool:
        """Whether a checkpoint lies on the timeline that this ledger tells of.

        A checkpoint written between a spike's snapshot and its rollback holds updates that were taken back.

        Args:
            position: The data position that the checkpoint would go on from.
            length: Entries of the ledger when it was written.
        """
        return length <= len(self) and all(position <= entry.low for entry in self.entries[length:])

    def state_dict(self) -> list[str]:
        """One line of JSON per entry."""
        return [entry.to_json() for entry in self.entries]

    @classmethod
    def from_state(cls, lines: Sequence[str]) -> SkipLedger:
        """The ledger of ``state_dict``'s lines."""
        return cls([Skip.from_json(line) for line in lines])

    def reconciled(self, saved: SkipLedger) -> SkipLedger:
        """The longer of this ledger and one from a checkpoint: both tell of the same run.

        Raises:
            DataError: They do not begin alike.
        """
        shared = min(len(self), len(saved))
        if self.state_dict()[:shared] != saved.state_dict()[:shared]:
            raise DataError(
                "The run's skip ledger and the checkpoint's tell of different rollbacks; resume into the run's own "
                "folder, or start a new run."
            )
        return self if len(self) >= len(saved) else saved
