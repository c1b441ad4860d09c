"""Numbers that no run can use, found before any process starts: no torch, no Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.rates import KNOWN, RatePlan, plan_rates

ADAM = ("lit_pretrain.optim.adamw", "torch.optim.Adam", "torch.optim.AdamW")
LONG = 10**15
"""Updates that no warmup exceeds, to check a schedule whose run has no length yet."""
_TEXTS = ("_target_", "shape")
"""Settings of a schedule that are no numbers."""


def check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, and those that optimizer and schedule cannot use.

    Args:
        config: The resolved configuration, plain containers.

    Raises:
        ConfigError: With the setting, the value, the rule and the way out.
    """
    # What the user sets comes before what is made of it: module.optimizer is optimizer once more.
    for key in sorted(config, key=lambda key: key in ("module", "trainer")):
        for name in _not_a_number(config[key], str(key)):
            raise ConfigError(f"{name}=nan is not a number; give one, or leave {name} out.")
    optimizer, schedule = config.get("optimizer"), config.get("schedule")
    if isinstance(optimizer, Mapping):
        _check_optimizer(optimizer)
    if isinstance(schedule, Mapping):
        steps = (config.get("trainer") or {}).get("max_steps")
        tokens = (config.get("batch") or {}).get("tokens_per_update")
        updates = steps if isinstance(steps, int) and steps > 0 else None
        rates(schedule, updates=updates, tokens_per_update=tokens, peak=optimizer and optimizer.get("lr"))


def finite(value: object) -> float | None:
    """A finite number, or None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def rates(schedule: object, *, updates: int | None, tokens_per_update: int | None, peak: object) -> RatePlan | None:
    """What a schedule of ours does over a run; None for others, and where nobody knows how long the run is.

    Args:
        schedule: Its node.
        updates: Of the run.
        tokens_per_update: Over all ranks.
        peak: Learning rate, if it is one.

    Raises:
        ConfigError: As the callback would raise.
    """
    if not isinstance(schedule, Mapping):
        return None
    package, _, name = str(schedule.get("_target_", "")).rpartition(".")
    if name not in KNOWN or not package.startswith("lit_pretrain"):
        return None
    for key, value in schedule.items():
        if key not in _TEXTS and value is not None and finite(value) is None:
            raise ConfigError(f"schedule.{key}={value!r} must be a finite number, or null.")
    plan = plan_rates(
        name, schedule, updates=updates or LONG, tokens_per_update=tokens_per_update or 1, peak=finite(peak)
    )
    return plan if updates and tokens_per_update else None


def _not_a_number(node: object, name: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _not_a_number(value, f"{name}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _not_a_number(value, f"{name}[{index}]")
    elif isinstance(node, float) and math.isnan(node):
        yield name


def _check_optimizer(node: Mapping[str, Any]) -> None:
    """The ranges of AdamW's settings, which the optimizer itself would refuse once the model is made."""
    if node.get("_target_") not in ADAM:
        return
    for key, least in {"lr": "of at least 0", "weight_decay": "of at least 0", "eps": "above 0"}.items():
        value = finite(node[key]) if key in node else 1.0
        if value is None or value < 0 or (value == 0 and least == "above 0"):
            raise ConfigError(f"optimizer.{key}={node[key]!r} must be a finite number {least}.")
    betas = node.get("betas", [0.0, 0.0])
    decays = [finite(beta) for beta in betas] if isinstance(betas, list) else []
    if len(decays) != 2 or not all(beta is not None and 0 <= beta < 1 for beta in decays):
        raise ConfigError(
            f"optimizer.betas={betas!r} must be two numbers of at least 0 and below 1, such as [0.9, 0.95]."
        )
