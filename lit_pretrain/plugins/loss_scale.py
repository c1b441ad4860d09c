"""The scale of the loss under float16, as a state machine of plain numbers."""

from __future__ import annotations

import math
from typing import Any

from lit_pretrain.errors import ConfigError


class DynamicLossScaler:
    """Raises the loss scale while updates are clean and lowers it after each one whose gradients are not finite.

    Nothing here touches a tensor or another rank: whoever asks ranks agrees on ``overflow`` first. All numbers are
    powers of two, so that scaling and unscaling round nothing.

    Args:
        initial_scale: What the loss is multiplied with at first.
        growth_factor: Of the scale, after ``growth_interval`` clean updates in a row.
        growth_interval: Clean updates in a row before it grows.
        backoff_factor: Of the scale, after an overflow.
        min_scale: The floor. An overflow at the floor stops the run: a smaller scale would not be tried.
        max_scale: The ceiling.
        max_consecutive_skips: So many overflows in a row stop the run.

    Raises:
        ConfigError: A setting is out of range.

    Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int = 20,
    ) -> None:
        settings = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
        settings |= {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        for name, value in settings.items():
            if not _is_power_of_two(value):
                raise ConfigError(
                    f"scaler.{name}={value!r} must be a power of two, from 2^-126 to 2^126, so that unscaling is exact."
                )
        if not growth_factor >= 1:
            raise ConfigError(f"scaler.growth_factor={growth_factor!r} must be at least 1; 1 never grows.")
        if not backoff_factor < 1:
            raise ConfigError(f"scaler.backoff_factor={backoff_factor!r} must be below 1.")
        if not min_scale <= initial_scale <= max_scale:
            raise ConfigError(
                f"scaler.initial_scale={initial_scale:g} must lie between scaler.min_scale={min_scale:g} and "
                f"scaler.max_scale={max_scale:g}."
            )
        for name, count in (("growth_interval", growth_interval), ("max_consecutive_skips", max_consecutive_skips)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"scaler.{name}={count!r} must be a whole number of at least 1.")
        self.initial_scale, self.min_scale, self.max_scale = float(initial_scale), float(min_scale), float(max_scale)
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.max_consecutive_skips = growth_interval, max_consecutive_skips
        self.scale = self.initial_scale
        self.clean_updates = 0
        self.skipped_updates = 0
        self.consecutive_skips = 0
        self._at_floor = False

    def update(self, *, overflow: bool) -> None:
        """Note how an update went, the same on every rank.

        Args:
            overflow: Whether any gradient on any rank was not finite, so that the update was skipped.
        """
        if overflow:
            self._at_floor = self.scale <= self.min_scale
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            self.clean_updates = 0
            self.skipped_updates += 1
            self.consecutive_skips += 1
            return
        self._at_floor = False
        self.consecutive_skips = 0
        self.clean_updates += 1
        if self.clean_updates == self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
            self.clean_updates = 0

    @property
    def exhausted(self) -> str | None:
        """Why the run has to stop now; None while it may go on."""
        if self._at_floor:
            return f"the loss scale is at its floor of {self.min_scale:g} (scaler.min_scale)"
        if self.consecutive_skips >= self.max_consecutive_skips:
            return f"{self.consecutive_skips} updates in a row were skipped (scaler.max_consecutive_skips)"
        return None

    def is_enabled(self) -> bool:
        """Callbacks ask whether a scaler owns what happens to non-finite gradients."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: where the scale stands, not how it is set up."""
        return {
            "scale": self.scale,
            "clean_updates": self.clean_updates,
            "skipped_updates": self.skipped_updates,
            "consecutive_skips": self.consecutive_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; a scale outside the floor and ceiling set now is brought within.

        Raises:
            ConfigError: A number is missing: a scaler restored by halves would go wrong in silence.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ConfigError(f"The saved state of the loss scaler lacks {missing[0]!r}; take another checkpoint.")
        self.scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        # A shorter interval than that of the saved run must not be passed over.
        self.clean_updates = min(int(state["clean_updates"]), self.growth_interval - 1)
        self.skipped_updates = int(state["skipped_updates"])
        self.consecutive_skips = int(state["consecutive_skips"])
        self._at_floor = False


def _is_power_of_two(value: object) -> bool:
    """Of those that float32 holds, and their inverses too, with all bits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 2.0**-126 <= value <= 2.0**126:
        return False
    return math.frexp(value)[0] == 0.5
