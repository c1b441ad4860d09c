"""When a loss is out of the ordinary: two rules as pure functions of the losses before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lit_pretrain.checks import number, whole
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes.noise import MEDIAN_TO_MEAN, level, median, noise

_SMALLEST_NOISE = 1e-12  # a constant curve has none
_ENOUGH = 4.0  # times the largest accepted loss
_LEAST_BESIDE_ZERO = 1e-6  # where losses have come to 0: about what single precision gives above it
_LARGEST_Z = 1e9  # a z-score has to stay finite, for JSON's sake


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How one value stands to those before it.

    Args:
        kind: ``jump``, ``shift`` or ``gradient``; None for an ordinary value.
        value: What was judged: the loss, the median of the newest losses, or the gradient norm.
        z: How far above the level, in units of the noise.
        threshold: The value above which it is out of the ordinary; of an ordinary loss, by differences alone.
        reason: One sentence.
    """

    kind: Literal["jump", "shift", "gradient"] | None
    value: float
    z: float
    threshold: float
    reason: str


def _sigmas(value: float, height: float, sigma: float) -> float:
    return min(max((value - height) / sigma, -_LARGEST_Z), _LARGEST_Z)


class SpikeRule(Protocol):
    """What a detector asks of a rule."""

    @property
    def window(self) -> int:
        """Accepted updates to compare with."""
        ...

    @property
    def min_steps(self) -> int:
        """Accepted updates before anything is judged."""
        ...

    @property
    def patience(self) -> int:
        """Updates out of the ordinary in a row that make a jump or a gradient spike."""
        ...

    @property
    def recent(self) -> int:
        """Newest losses, accepted or not, that the rule wants to see."""
        ...

    def judge_loss(self, window: Sequence[float], recent: Sequence[float]) -> Finding:
        """Judge the newest of ``recent`` by the accepted losses in ``window``, oldest first."""
        ...

    def judge_norm(self, window: Sequence[float], norm: float) -> Finding | None:
        """Judge a gradient norm by the accepted ones; None if the rule does not look at norms."""
        ...


def _check_window(name: str, *, window: int, min_steps: int, patience: int) -> None:
    whole(f"{name}.window", window, least=10, most=1_000_000)
    whole(f"{name}.min_steps", min_steps, least=2)
    whole(f"{name}.patience", patience, least=1, most=1_000_000)
    if min_steps > window:
        raise ConfigError(
            f"{name}.min_steps={min_steps} must not exceed {name}.window={window}, or nothing is ever judged; "
            "lower min_steps or widen the window."
        )


@dataclass(frozen=True, kw_only=True)
class MeanRule:
    """A loss above ``factor`` times the mean of the last ``window`` accepted ones.

    Made for losses that explode: near a level of 3 nats it fires above 12, more than guessing at random costs with
    any usual vocabulary. A level of 0 or less never fires.

    Args:
        factor: Times the mean.
        window: Accepted updates in the mean.
        min_steps: Accepted updates before anything is judged.
        patience: Such losses in a row that make a spike.

    Raises:
        ConfigError: When a setting is impossible.
    """

    factor: float = 4.0
    window: int = 100
    min_steps: int = 20
    patience: int = 1

    def __post_init__(self) -> None:
        number("spikes.mean.factor", self.factor, above=1.0)
        _check_window("spikes.mean", window=self.window, min_steps=self.min_steps, patience=self.patience)

    @property
    def recent(self) -> int:
        """One: the newest loss."""
        return 1

    def judge_loss(self, window: Sequence[float], recent: Sequence[float]) -> Finding:
        """Compare the newest loss with the mean."""
        loss, n = recent[-1], len(window)
        mean = math.fsum(value / n for value in window)
        threshold = self.factor * mean
        sigma = max(noise(window), _SMALLEST_NOISE)
        is_jump = mean > 0 and loss > threshold
        return Finding(
            kind="jump" if is_jump else None,
            value=loss,
            z=_sigmas(loss, mean, sigma),
            threshold=threshold,
            reason=f"loss {loss:.4g} against {self.factor:g} x the mean {mean:.4g} of {n} updates",
        )

    def judge_norm(self, window: Sequence[float], norm: float) -> None:
        """Norms are not looked at."""
        return


@dataclass(frozen=True, kw_only=True)
class RobustRule:
    """A loss far above the median of those before it, measured in their noise.

    Two tests share one threshold. ``jump``: the loss stands ``threshold`` sigmas above the level, ``patience`` times
    in a row. ``shift``: the median of the ``recent`` newest losses does, in sigmas of such a median; it sees rises
    that the noise of single losses hides. Neither looks below the level, so an improvement is never a spike.

    A loss has to stand out in differences and in factors (the same test on logarithms). Where noise is small beside
    the level, as in language models, the two agree; a loss that has fallen to almost nothing scatters by factors, and
    differences alone would take its tail for spikes. More than 4 times the largest accepted loss is enough of a factor.
    Losses below 0 have no logarithm, and are judged by differences.

    On independent noise of which a share p lies above ``threshold`` sigmas and a share q above
    ``1.25 threshold / sqrt(recent)``, false alarms are as rare as p^patience plus the chance that more than half of
    ``recent`` draws are among those q.

    Args:
        threshold: In sigmas, robustly estimated (median absolute deviation) around the trend.
        window: Accepted updates to compare with.
        min_steps: Accepted updates before anything is judged.
        patience: Losses or norms out of the ordinary in a row that make a spike.
        recent: Newest losses in the shift test; odd.
        min_rise: A rise by less than this share of the level is never a spike, however small the noise.
        gradient_factor: A gradient norm is out of the ordinary from this many times its median on, if it also
            stands ``threshold`` sigmas above it (of its logarithm); None does not look at norms.

    Raises:
        ConfigError: When a setting is impossible.
    """

    threshold: float = 6.0
    window: int = 100
    min_steps: int = 20
    patience: int = 3
    recent: int = 9
    min_rise: float = 0.05
    gradient_factor: float | None = 4.0

    def __post_init__(self) -> None:
        number("spikes.robust.threshold", self.threshold, above=0.0)
        _check_window("spikes.robust", window=self.window, min_steps=self.min_steps, patience=self.patience)
        whole("spikes.robust.recent", self.recent, least=1)
        if self.recent % 2 == 0 or self.recent > self.window:
            raise ConfigError(
                f"spikes.robust.recent={self.recent} must be odd and at most spikes.robust.window={self.window}; "
                f"use {min(self.recent, self.window - 1) // 2 * 2 + 1}."
            )
        number("spikes.robust.min_rise", self.min_rise, least=0.0)
        if self.gradient_factor is not None:
            number("spikes.robust.gradient_factor", self.gradient_factor, above=1.0)

    def judge_loss(self, window: Sequence[float], recent: Sequence[float]) -> Finding:
        """Test the newest loss for a jump, then the newest losses for a shift."""
        height, sigma = level(window), noise(window)
        least = self.min_rise * abs(height) / self.threshold
        jump = self._test(recent[-1], window, height, max(sigma, least, _SMALLEST_NOISE), "jump")
        if jump.kind is not None or len(recent) < self.recent:
            return jump
        newest, scatter = median(recent[-self.recent :]), sigma * self._scatter("shift")
        shift = self._test(newest, window, height, max(scatter, least, _SMALLEST_NOISE), "shift")
        # The newest loss has to be part of it, or the alarm would outlast the spike by half of `recent`.
        return shift if shift.kind is not None and recent[-1] > shift.threshold else jump

    def _scatter(self, kind: Literal["jump", "shift"]) -> float:
        """How much what is judged scatters, in the noise of single losses: a loss, or a median of the newest."""
        return 1.0 if kind == "jump" else MEDIAN_TO_MEAN / math.sqrt(self.recent)

    def _test(
        self, value: float, window: Sequence[float], height: float, sigma: float, kind: Literal["jump", "shift"]
    ) -> Finding:
        threshold = height + self.threshold * sigma
        if value > threshold:  # rarely: the logarithms cost as much as the rest
            threshold = max(threshold, self._threshold_in_factors(window, kind))
        z = _sigmas(value, height, sigma)
        what = "loss" if kind == "jump" else f"median {self.recent} losses"
        return Finding(
            kind=kind if value > threshold else None,
            value=value,
            z=z,
            threshold=threshold,
            reason=f"{what} {value:.4g} is {z:.1f} sigmas of {sigma:.2g} above the level {height:.4g}",
        )

    def _threshold_in_factors(self, window: Sequence[float], kind: Literal["jump", "shift"]) -> float:
        lowest, enough = min(window), _ENOUGH * max(window)
        if lowest < 0.0:
            return -math.inf
        if lowest == 0.0:
            return max(enough, _LEAST_BESIDE_ZERO)
        logs = [math.log(loss) for loss in window]
        height = level(logs) + self.threshold * self._scatter(kind) * noise(logs)
        return min(math.exp(min(height, 700.0)), enough)

    def judge_norm(self, window: Sequence[float], norm: float) -> Finding | None:
        """Compare the logarithm of the newest norm with the newer half of those before it."""
        if self.gradient_factor is None or norm <= 0.0:
            return None
        logs = [math.log(value) for value in window]
        height = median(logs[len(logs) // 2 :])
        sigma = max(noise(logs), math.log(self.gradient_factor) / self.threshold)
        z = (math.log(norm) - height) / sigma
        return Finding(
            kind="gradient" if z > self.threshold else None,
            value=norm,
            z=z,
            threshold=math.exp(min(height + self.threshold * sigma, 700.0)),  # exp(710) is infinite
            reason=f"gradient norm {norm:.4g} is {norm / math.exp(height):.3g} x its median {math.exp(height):.4g}",
        )
