"""How long a warmup and a run are, in updates or in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_pretrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """The user's words for warmup and total, before the trainer is known.

    Args:
        warmup_steps: Warmup in updates.
        warmup_tokens: Warmup in tokens.
        warmup_fraction: Warmup as a share of the total.
        total_steps: Total in updates.
        total_tokens: Total in tokens.
    """

    warmup_steps: int | None = None
    warmup_tokens: int | None = None
    warmup_fraction: float | None = None
    total_steps: int | None = None
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        warmups = {
            "warmup_steps": self.warmup_steps,
            "warmup_tokens": self.warmup_tokens,
            "warmup_fraction": self.warmup_fraction,
        }
        given = [f"schedule.{name}={value}" for name, value in warmups.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"Exactly one of schedule.warmup_steps, warmup_tokens, warmup_fraction must be set, not "
                f"{' and '.join(given) or 'none'}."
            )
        if self.total_steps is not None and self.total_tokens is not None:
            raise ConfigError(
                f"schedule.total_steps={self.total_steps} and schedule.total_tokens={self.total_tokens} exclude each "
                "other; set one."
            )
        for name in ("warmup_steps", "warmup_tokens", "total_steps", "total_tokens"):
            value, least = getattr(self, name), 0 if name.startswith("warmup") else 1
            if value is not None and (isinstance(value, bool) or value != int(value) or value < least):
                raise ConfigError(f"schedule.{name}={value} must be a whole number of at least {least}.")
        if self.warmup_fraction is not None and not 0.0 <= self.warmup_fraction <= 1.0:
            raise ConfigError(f"schedule.warmup_fraction={self.warmup_fraction} must lie between 0 and 1.")

    @property
    def in_tokens(self) -> bool:
        """Whether the curve is a function of tokens: the total decides, and without one the warmup."""
        if self.total_tokens is not None:
            return True
        return self.total_steps is None and self.warmup_tokens is not None

    def needs_trainer(self, *, endless: bool) -> bool:
        """Whether the trainer has to say how long the run is.

        Args:
            endless: The curve can do without an end.
        """
        if self.total_steps is not None or self.total_tokens is not None:
            return False
        return not endless or self.warmup_fraction is not None

    def resolve(
        self, trainer_updates: float | None, *, tokens_per_update: int | None, endless: bool
    ) -> tuple[float, float]:
        """Warmup and total in the counter's units.

        Args:
            trainer_updates: Updates the trainer will run; None where nobody asked it.
            tokens_per_update: To change between updates and tokens.
            endless: The curve needs no end: one is used only if the user gave it.

        Raises:
            ConfigError: If updates and tokens are mixed and nobody says how many tokens an update uses.
        """
        unit = tokens_per_update if self.in_tokens else 1
        mixed = (self.in_tokens and self.warmup_tokens is None and self.warmup_fraction is None) or (
            not self.in_tokens and self.warmup_tokens is not None
        )
        if tokens_per_update is None and (self.in_tokens or mixed):
            raise ConfigError(
                "The schedule mixes or counts tokens, and nobody says how many an update uses; set "
                "schedule.tokens_per_update, or use a data module with a tokens_per_update property."
            )
        assert unit is not None
        total: float = math.inf
        if self.total_steps is not None:
            total = self.total_steps
        elif self.total_tokens is not None:
            total = self.total_tokens
        elif trainer_updates is not None:
            total = trainer_updates * unit
        if self.warmup_fraction is not None:
            warmup: float = self.warmup_fraction * total
            warmup = warmup if self.in_tokens else round(warmup)
        elif self.warmup_steps is not None:
            warmup = self.warmup_steps * unit
        else:
            assert self.warmup_tokens is not None
            warmup = self.warmup_tokens if self.in_tokens else self.warmup_tokens / (tokens_per_update or 1)
        given = self.total_steps is not None or self.total_tokens is not None
        return warmup, math.inf if endless and not given else total
