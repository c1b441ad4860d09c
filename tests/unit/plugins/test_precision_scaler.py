"""Scaler trajectories against tables written by hand: no formula of the implementation is used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import DynamicLossScaler

# Overflow pattern (x: overflow, .: clean) and the scale after each update, from 8 with an interval of 3.
TABLES = {
    "never": ("......", [8, 8, 16, 16, 16, 32]),
    "first": ("x......", [4, 4, 4, 8, 8, 8, 16]),
    "breaks the row": ("..x...", [8, 8, 4, 4, 4, 8]),
    "on the growing update": ("..x..x...", [8, 8, 4, 4, 4, 2, 2, 2, 4]),
    "two in a row": (".xx...", [8, 4, 2, 2, 2, 4]),
    "just after growing": ("...x...", [8, 8, 16, 8, 8, 8, 16]),
    "alternating never grows": (".x.x.x", [8, 4, 4, 2, 2, 1]),
    "up to the ceiling and not over it": ("............", [8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64]),
    "down to the floor": ("xxx", [4, 2, 1]),
}


@pytest.mark.parametrize("name", TABLES)
def test_trajectory(name: str) -> None:
    pattern, scales = TABLES[name]
    scaler = DynamicLossScaler(initial_scale=8, growth_interval=3, min_scale=1, max_scale=64)
    found = []
    for mark in pattern:
        scaler.update(overflow=mark == "x")
        found.append(scaler.scale)
    assert found == scales
    assert scaler.skipped_updates == pattern.count("x")


def test_defaults_are_those_of_the_design() -> None:
    scaler = DynamicLossScaler()
    assert (scaler.scale, scaler.growth_factor, scaler.backoff_factor) == (32768.0, 2.0, 0.5)
    for _ in range(1999):
        scaler.update(overflow=False)
    assert scaler.scale == 32768.0
    scaler.update(overflow=False)
    assert scaler.scale == 65536.0


def test_stops_after_skips_in_a_row_and_not_after_as_many_apart() -> None:
    scaler = DynamicLossScaler(max_consecutive_skips=3)
    for mark in "xx.xx.xx":
        scaler.update(overflow=mark == "x")
        assert scaler.exhausted is None
    scaler.update(overflow=True)
    assert scaler.exhausted is not None
    assert "3 updates in a row" in scaler.exhausted


def test_reaching_the_floor_is_allowed_and_an_overflow_there_stops() -> None:
    scaler = DynamicLossScaler(initial_scale=2, min_scale=1)
    scaler.update(overflow=True)
    assert (scaler.scale, scaler.exhausted) == (1.0, None)
    scaler.update(overflow=False)
    scaler.update(overflow=True)
    assert scaler.exhausted is not None
    assert "floor of 1 " in scaler.exhausted
    scaler.update(overflow=False)
    assert scaler.exhausted is None


def test_state_goes_on_exactly_from_every_place() -> None:
    pattern = "..x...x.....xx...."
    whole = DynamicLossScaler(initial_scale=8, growth_interval=3)
    for place in range(len(pattern)):
        begun = DynamicLossScaler(initial_scale=8, growth_interval=3)
        for mark in pattern[:place]:
            begun.update(overflow=mark == "x")
        resumed = DynamicLossScaler(initial_scale=2, growth_interval=3)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        for mark in pattern[place:]:
            resumed.update(overflow=mark == "x")
            begun.update(overflow=mark == "x")
            assert resumed.state_dict() == begun.state_dict()
        whole.load_state_dict(begun.state_dict())
    assert whole.skipped_updates == pattern.count("x")


def test_a_half_state_is_refused_and_changed_bounds_hold() -> None:
    state: dict[str, Any] = {"scale": 64.0, "clean_updates": 9, "skipped_updates": 2, "consecutive_skips": 0}
    for name in state:
        with pytest.raises(ConfigError, match=f"lacks '{name}'"):
            DynamicLossScaler().load_state_dict({k: v for k, v in state.items() if k != name})
    scaler = DynamicLossScaler(initial_scale=8, max_scale=16, growth_interval=4)
    scaler.load_state_dict(state)
    assert scaler.scale == 16.0
    scaler.update(overflow=False)  # 9 of 4 clean updates: the next one grows, into the ceiling
    assert (scaler.scale, scaler.clean_updates) == (16.0, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"initial_scale": 30000.0}, "scaler.initial_scale=30000.0 must be a power of two"),
        ({"initial_scale": 0.0}, "power of two"),
        ({"initial_scale": float("inf")}, "power of two"),
        ({"initial_scale": float("nan")}, "power of two"),
        ({"initial_scale": "32768"}, "scaler.initial_scale='32768' must be a power of two"),
        ({"max_scale": 2.0**127}, "from 2\\^-126 to 2\\^126"),
        ({"growth_interval": -1}, "scaler.growth_interval=-1 must be a whole number"),
        ({"growth_factor": 0.5}, "scaler.growth_factor=0.5 must be at least 1"),
        ({"backoff_factor": 1.0}, "scaler.backoff_factor=1.0 must be below 1"),
        ({"initial_scale": 2.0, "min_scale": 4.0}, "between scaler.min_scale=4 and"),
        ({"growth_interval": 0}, "scaler.growth_interval=0 must be a whole number"),
        ({"max_consecutive_skips": 1.5}, "scaler.max_consecutive_skips=1.5"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DynamicLossScaler(**settings)
