"""Checks of settings."""

from __future__ import annotations

import math

from lit_pretrain.errors import ConfigError


def whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")


def number(name: str, value: object, *, least: float | None = None, above: float | None = None) -> None:
    """Refuse what is no finite number of at least ``least`` or above ``above``."""
    real = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    if math.isfinite(real) and (least is None or real >= least) and (above is None or real > above):
        return
    rule = f"of at least {least:g}" if least is not None else f"above {above:g}"
    raise ConfigError(f"{name}={value!r} must be a finite number {rule}.")
