"""The spike detector: a state machine on floats."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes.rules import Finding, MeanRule, RobustRule, SpikeRule
from lit_pretrain.spikes.verdict import Kind, Verdict

_RULES: dict[str, SpikeRule] = {"robust": RobustRule(), "mean": MeanRule()}
_KEYS = ("losses", "norms", "recent", "streak")


class SpikeDetector:
    """Judges every update by those accepted before it.

    Only accepted updates enter the window: a spike that lasts does not become the new normal. The same floats give
    the same verdicts everywhere, so ranks that agree on the loss agree on the verdict. NaN and infinity are spikes at
    once, under every rule and from the first update on; show it no update that a loss scaler has skipped already.

    Args:
        rule: ``robust``, ``mean``, or a rule with settings of its own.

    Raises:
        ConfigError: For an unknown rule.

    Example:
        ``SpikeDetector().observe(2.31, step=7, grad_norm=0.8).is_spike``
    """

    def __init__(self, rule: SpikeRule | str = "robust") -> None:
        if isinstance(rule, str):
            if rule not in _RULES:
                raise ConfigError(f"spikes.rule={rule!r} is unknown; use {' or '.join(_RULES)}, or a rule object.")
            rule = _RULES[rule]
        elif isinstance(rule, type) or not hasattr(rule, "judge_loss"):
            raise ConfigError(f"spikes.rule={rule!r} must be {' or '.join(_RULES)}, or a rule object.")
        self.rule = rule
        self._losses: deque[float] = deque(maxlen=rule.window)
        self._norms: deque[float] = deque(maxlen=rule.window)
        self._recent: deque[float] = deque(maxlen=rule.recent)
        self._streak = 0

    def observe(self, loss: float, *, step: int, grad_norm: float | None = None) -> Verdict:
        """Judge one update and, if it is accepted, remember it.

        Args:
            loss: Of the global batch, the same on every rank.
            step: The update, one more than at the last call; for the verdict only.
            grad_norm: Before clipping, in true units; None where it is not known.
        """
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                self._streak += 1
                return self._verdict("nonfinite", step, float(value), None, f"the {what} is {value}")
        self._recent.append(loss)
        findings = self._findings(loss, grad_norm)
        out = next((finding for finding in findings if finding.kind is not None), None)
        if out is None:
            self._streak = 0
            self._losses.append(loss)
            if grad_norm is not None and grad_norm > 0.0:
                self._norms.append(grad_norm)
            if not findings:
                n, need = len(self._losses), self.rule.min_steps
                return self._verdict("learning", step, loss, None, f"update {n} of {need} to learn the level from")
            return self._verdict("normal", step, loss, findings[0], findings[0].reason)
        self._streak += 1
        kind: Kind = out.kind or "normal"
        if kind == "shift" or self._streak >= self.rule.patience:
            return self._verdict(kind, step, out.value, out, out.reason)
        reason = f"{out.reason}; {self._streak} in a row, a spike from {self.rule.patience} on"
        return self._verdict("suspect", step, out.value, out, reason)

    @property
    def is_suspicious(self) -> bool:
        """Whether the last update was out of the ordinary, and more of its kind would make a spike."""
        return self._streak > 0

    def _findings(self, loss: float, grad_norm: float | None) -> list[Finding]:
        """What the rule says, the loss first; empty while it learns."""
        if len(self._losses) < self.rule.min_steps:
            return []
        found = [self.rule.judge_loss(tuple(self._losses), tuple(self._recent))]
        if grad_norm is not None and len(self._norms) >= self.rule.min_steps:
            norm = self.rule.judge_norm(tuple(self._norms), grad_norm)
            found += [] if norm is None else [norm]
        return found

    def _verdict(self, kind: Kind, step: int, value: float, finding: Finding | None, reason: str) -> Verdict:
        return Verdict(
            kind=kind,
            step=step,
            value=value,
            z=None if finding is None else finding.z,
            threshold=None if finding is None else finding.threshold,
            streak=self._streak,
            began=step - max(self._streak, self.rule.recent if kind == "shift" else 1) + 1,
            reason=f"Update {step}: {reason}.",
        )

    def reset(self) -> None:
        """Forget everything, for a level that has changed for good (another mixture, another objective)."""
        self._losses.clear()
        self._norms.clear()
        self._recent.clear()
        self._streak = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next verdict: lists of floats and one integer, exact in JSON too."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "recent": list(self._recent),
            "streak": self._streak,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another detector stopped. A narrower window keeps the newest values.

        Raises:
            ConfigError: When the state is not a detector's.
        """
        if set(state) != set(_KEYS):
            raise ConfigError(
                f"The spike detector's state has the keys {sorted(state)}, not {sorted(_KEYS)}; it comes from another "
                "version or another callback: start without it."
            )
        self._losses = deque(map(float, state["losses"]), maxlen=self.rule.window)
        self._norms = deque(map(float, state["norms"]), maxlen=self.rule.window)
        self._recent = deque(map(float, state["recent"]), maxlen=self.rule.recent)
        self._streak = int(state["streak"])
