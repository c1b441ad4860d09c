"""Checks of what a user has set, each with one sentence to answer with."""

from __future__ import annotations

import math
from pathlib import Path

from lit_pretrain.errors import ConfigError


def whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Refuse what is no whole number from ``least`` to ``most``.

    Raises:
        ConfigError: Naming ``name``, the value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value!r} must be at most {most:,}.")


def number(
    name: str, value: object, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> None:
    """Refuse what is no finite number of at least ``least``, or above ``above``, and at most ``most``.

    Raises:
        ConfigError: Naming ``name``, the value and the rule.
    """
    try:
        real = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number that no float can hold
        real = math.inf
    high_enough = (least is None or real >= least) and (above is None or real > above)
    if math.isfinite(real) and high_enough and (most is None or real <= most):
        return
    rule = f"of at least {least:g}" if least is not None else f"above {above:g}"
    rule += "" if most is None else f" and at most {most:g}"
    raise ConfigError(f"{name}={value!r} must be a finite number {rule}.")


def path(name: str, value: object) -> None:
    """Refuse what is neither a path nor None.

    Raises:
        ConfigError: Naming ``name`` and the value.
    """
    if value is not None and (not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value)):
        raise ConfigError(f"{name}={value!r} must be a path, or null.")


def flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false.

    Raises:
        ConfigError: Naming ``name`` and the value.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false.")
