"""What ends a run: a ratio of tokens to parameters, FLOPs, tokens, time, money, or a gain too small to pay for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.laws import LAWS


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits; whichever is reached first ends the run.

    Args:
        ratio: Tokens that count per parameter. 20 is about what the Chinchilla paper found best for a given compute.
        max_tokens: Tokens that count.
        max_flops: Model FLOPs spent, those of updates that were taken back included.
        max_hours: Wall-clock hours of training, likewise, over all resumes.
        max_cost: Money spent, likewise; needs ``price_per_device_hour``.
        price_per_device_hour: In the same money.
        min_gain: Nats by which the loss has to fall for another 1e18 FLOPs, as ``law`` predicts it.
        law: A key of ``lit_pretrain.planning.laws.LAWS``.

    Raises:
        ConfigError: A limit is not above 0, there is none, or money has no price.

    Source: Hoffmann et al. 2022, table 3 (about 20 tokens a parameter).
    """

    ratio: float | None = 20.0
    max_tokens: float | None = None
    max_flops: float | None = None
    max_hours: float | None = None
    max_cost: float | None = None
    price_per_device_hour: float | None = None
    min_gain: float | None = None
    law: str = "hoffmann"

    def __post_init__(self) -> None:
        limits = [f.name for f in fields(self) if f.name not in ("law", "price_per_device_hour")]
        for name in (*limits, "price_per_device_hour"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise ConfigError(f"budget.{name}={value!r} must be a number above 0, or null.")
        if all(getattr(self, name) is None for name in limits):
            raise ConfigError(f"A budget needs a limit; set one of budget.{', budget.'.join(limits)}.")
        if self.max_cost is not None and self.price_per_device_hour is None:
            raise ConfigError(f"budget.max_cost={self.max_cost} needs budget.price_per_device_hour.")
        if self.law not in LAWS:
            raise ConfigError(f"budget.law={self.law!r} is unknown; use one of {', '.join(LAWS)}.")

    def tokens(self, *, parameters: int, flops_per_token: float | None) -> dict[str, float]:
        """The limits that are tokens, by the name of their setting.

        Args:
            parameters: N, as it is to be counted.
            flops_per_token: Forward and backward; None where nobody knows.

        Raises:
            ConfigError: FLOPs are limited and nobody knows them.
        """
        found: dict[str, float] = {}
        if self.ratio is not None:
            found["ratio"] = self.ratio * parameters
        if self.max_tokens is not None:
            found["max_tokens"] = float(self.max_tokens)
        if self.max_flops is not None:
            if not flops_per_token:
                raise ConfigError(
                    f"budget.max_flops={self.max_flops:g} needs to know the FLOPs of a token; give the module an "
                    "attribute flops_per_token."
                )
            found["max_flops"] = self.max_flops / flops_per_token
        if self.min_gain is not None:
            found["min_gain"] = LAWS[self.law].tokens_at_gain(self.min_gain / 1e18, parameters=parameters)
        return found

    def seconds(self, *, devices: int) -> dict[str, float]:
        """The limits that are time, by the name of their setting; of one device's clock, in seconds."""
        found: dict[str, float] = {}
        if self.max_hours is not None:
            found["max_hours"] = self.max_hours * 3600.0
        if self.max_cost is not None and self.price_per_device_hour is not None:
            found["max_cost"] = self.max_cost / self.price_per_device_hour * 3600.0 / devices
        return found
