"""Schedules in numbers, by hand."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lit_pretrain import callbacks
from lit_pretrain.callbacks import LearningRateSchedule
from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.rates import KNOWN, RatePlan, plan_rates


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        # 5% of 200 updates; the first at 1 / 10; a cosine over the other 190, down to a tenth
        ("WarmupCosine", {"warmup_fraction": 0.05}, (10, 190, 0.1, 0.1)),
        ("WarmupLinear", {"warmup_steps": 0, "min_ratio": 0.0}, (0, 199, 1.0, 0.0)),
        # 640 tokens are 10 updates of 64
        ("WarmupCosine", {"warmup_tokens": 640, "min_ratio": 0.25}, (10, 190, 0.1, 0.25)),
        ("WarmupStableDecay", {"warmup_steps": 20, "decay_fraction": 0.25}, (20, 50, 0.05, 0.1)),
        ("WarmupConstant", {"warmup_steps": 4, "min_ratio": 0.1}, (4, 0, 0.25, 1.0)),
        # sqrt(50 / 200)
        ("WarmupInverseSqrt", {"warmup_steps": 50}, (50, 150, 0.02, 0.5)),
        # the run ends in the middle of the horizon: 100 of 190 updates of a straight line from 1 to 0
        ("WarmupLinear", {"warmup_steps": 100, "total_steps": 300, "min_ratio": 0.0}, (100, 200, 0.01, 0.5)),
        ("WarmupCosine", {"warmup_steps": 10, "start_lr": 1e-4}, (10, 190, 0.2, 0.1)),
    ],
)
def test_by_hand(name: str, settings: dict[str, Any], expected: tuple[float, ...]) -> None:
    plan = plan_rates(name, settings, updates=200, tokens_per_update=64, peak=5e-4)
    found = (plan.warmup_updates, plan.decay_updates, plan.first, plan.last)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"warmup_steps": 300}, "schedule.warmup=300 must not exceed schedule.total=200"),
        ({"warmup_steps": 3, "warmup_fraction": 0.1}, "Exactly one of schedule.warmup_steps"),
        ({"warmup_fraction": 2}, "warmup_fraction=2 must lie between 0 and 1"),
        ({"warmup_steps": 3, "min_ratio": 2}, "min_ratio=2 must lie between 0 and 1"),
    ],
)
def test_refused_as_the_callback_would(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_rates("WarmupCosine", settings, updates=200, tokens_per_update=64)


def test_every_schedule_callback_is_known() -> None:
    classes = {
        name
        for name, value in vars(callbacks).items()
        if inspect.isclass(value) and issubclass(value, LearningRateSchedule) and value is not LearningRateSchedule
    }
    assert classes == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("settings", [{"warmup_fraction": 0.1}, {"warmup_steps": 7}, {"warmup_tokens": 1000}])
def test_equals_what_the_callback_computes(name: str, settings: dict[str, Any]) -> None:
    """The callback's own factor at the first and at the last update."""
    plan = plan_rates(name, settings, updates=50, tokens_per_update=64)
    schedule = getattr(callbacks, name)(**settings, tokens_per_update=64)
    schedule._trainer_updates = 50
    factors = []
    for update in (0, 49):
        schedule.rewind(applied_updates=update, applied_tokens=64 * update)
        factors.append(schedule.factor())
    assert plan == RatePlan(
        warmup_updates=plan.warmup_updates, decay_updates=plan.decay_updates, first=factors[0], last=factors[1]
    )
