"""What a spike detector says about one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["normal", "learning", "suspect", "jump", "shift", "gradient", "nonfinite"]

_SPIKES = frozenset({"jump", "shift", "gradient", "nonfinite"})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one update.

    Args:
        kind: ``normal``; ``learning`` while there is too little to compare with; ``suspect`` for an update out of the
            ordinary that patience still waits out; else a spike: ``jump`` (the loss stands far above its level),
            ``shift`` (most of the newest losses do), ``gradient`` (the gradient norm does) or ``nonfinite``.
        step: The update; update u is the one that makes u applied updates of u - 1.
        value: The loss, or the gradient norm where that is what stands out.
        z: How far above the level in units of the noise; None where nothing could be compared.
        threshold: The value above which an update is out of the ordinary; None likewise.
        streak: Updates out of the ordinary in a row, this one included. An alarm wants the first spike of a streak.
        began: The first update that may have been part of it, looking back; ``step`` for an ordinary update. The
            weights before that update are the newest that nothing speaks against.
        reason: One sentence with the figures.
    """

    kind: Kind
    step: int
    value: float
    z: float | None
    threshold: float | None
    streak: int
    began: int
    reason: str

    @property
    def is_spike(self) -> bool:
        """Whether to act on it."""
        return self.kind in _SPIKES

    @property
    def is_accepted(self) -> bool:
        """Whether the update counts as normal from now on: it has entered the detector's window."""
        return self.kind in ("normal", "learning")
