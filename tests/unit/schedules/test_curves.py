"""Literal numbers from the convention: first at 1/warmup, end of the warmup at 1, last at the minimum."""

from __future__ import annotations

import math

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules import constant, cosine, inverse_sqrt, linear, wsd


def table(curve, n, **settings):
    return [curve(u, **settings) for u in range(n)]


def test_cosine_by_hand():
    # warmup 4, total 8: progress after the warmup is 1/4, 2/4, 3/4, 4/4; cos(pi/4) = 0.70710678...
    r = math.sqrt(0.5)
    want = [0.25, 0.5, 0.75, 1.0, 0.1 + 0.45 * (1 + r), 0.55, 0.1 + 0.45 * (1 - r), 0.1, 0.1, 0.1]
    assert table(cosine, 10, warmup=4, total=8) == pytest.approx(want, abs=1e-15)


def test_linear_by_hand():
    want = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert table(linear, 7, warmup=2, total=6, min_ratio=0.2) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize(
    ("shape", "fall"),
    [
        ("linear", [0.75, 0.5, 0.25]),
        ("cosine", [(2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]),
        ("1-sqrt", [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ],
)
def test_wsd_by_hand(shape, fall):
    want = [0.5, 1.0, 1.0, 1.0, *fall, 0.0, 0.0]
    got = table(wsd, 9, warmup=2, total=8, decay=4, shape=shape, min_ratio=0.0)
    assert got == pytest.approx(want, abs=1e-15)


def test_inverse_sqrt_by_hand():
    # warmup 4: the 16th update ends at 16, sqrt(4/16) = 1/2; the 9th at sqrt(4/9) = 2/3.
    assert inverse_sqrt(15, warmup=4) == 0.5
    assert inverse_sqrt(8, warmup=4) == pytest.approx(2 / 3, abs=1e-15)
    assert inverse_sqrt(10_000, warmup=4, min_ratio=0.1) == 0.1
    # total 16: heights 1, 2/3 (at 9), 1/2 (the floor) are mapped onto 1 .. 0.2: 0.2 + 0.8 * (2/3 - 1/2) / (1/2)
    got = [inverse_sqrt(u, warmup=4, total=16, min_ratio=0.2) for u in (3, 8, 15, 16)]
    assert got == pytest.approx([1.0, 0.2 + 0.8 / 3, 0.2, 0.2], abs=1e-15)


def test_constant_by_hand():
    assert table(constant, 5, warmup=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


CURVES = [
    (cosine, {}),
    (linear, {}),
    (wsd, {"decay": 5}),
    (wsd, {"decay": 5, "shape": "cosine"}),
    (wsd, {"decay": 5, "shape": "linear"}),
    (inverse_sqrt, {}),
]


@pytest.mark.parametrize(("curve", "more"), CURVES)
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 3, 7])
def test_ends_are_exact_and_nothing_rises_after_the_warmup(curve, more, min_ratio, warmup):
    got = table(curve, 20, warmup=warmup, total=13, min_ratio=min_ratio, **more)
    top = max(warmup, 1)
    assert got[0] == 1 / top
    assert got[top - 1] == 1.0
    assert got[12:] == [min_ratio] * 8
    assert all(a >= b for a, b in zip(got[top - 1 :], got[top:], strict=False))
    assert all(min_ratio <= value <= 1.0 for value in got[top - 1 :])


@pytest.mark.parametrize("curve", [cosine, linear, inverse_sqrt])
def test_warmup_equal_to_the_total(curve):
    assert table(curve, 4, warmup=3, total=3) == [1 / 3, 2 / 3, 1.0, 0.1]
    assert table(curve, 2, warmup=0, total=1) == [1.0, 0.1]


def test_start_ratio():
    got = table(cosine, 5, warmup=5, total=9, start_ratio=0.2)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)
    assert cosine(0, warmup=1, total=9, start_ratio=0.2) == 1.0


@pytest.mark.parametrize(("curve", "more"), [*CURVES, (constant, None)])
@pytest.mark.parametrize("start_ratio", [None, 0.01])
def test_tokens_are_updates_scaled(curve, more, start_ratio):
    """A run of 13 updates of 4,096 tokens has the same rates whichever way it is counted."""
    q = 4096
    for u in range(16):
        if more is None:
            by_update = curve(u, warmup=3, start_ratio=start_ratio)
            by_token = curve(u * q, warmup=3 * q, unit=q, start_ratio=start_ratio)
        else:
            by_update = curve(u, warmup=3, total=13, start_ratio=start_ratio, **more)
            scaled = {k: v * q if k == "decay" else v for k, v in more.items()}
            by_token = curve(u * q, warmup=3 * q, total=13 * q, unit=q, start_ratio=start_ratio, **scaled)
        assert by_token == pytest.approx(by_update, abs=1e-15)


def test_a_token_budget_that_is_no_multiple_of_the_update_still_ends_at_the_minimum():
    # 10 tokens in updates of 4: the third update starts at 8 and ends past 10, so it is the last one.
    assert [linear(x, warmup=4, total=10, unit=4) for x in (0, 4, 8, 12)] == pytest.approx([1.0, 0.4, 0.1, 0.1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": 9, "total": 8}, "warmup=9 must not exceed schedule.total=8"),
        ({"warmup": -1, "total": 8}, "warmup=-1"),
        ({"warmup": 1, "total": 0}, "total=0"),
        ({"warmup": 1, "total": 8, "min_ratio": 1.5}, "min_ratio=1.5"),
        ({"warmup": 1, "total": 8, "start_ratio": 0.0}, "start_ratio=0.0"),
        ({"warmup": 1, "total": 8, "unit": 0}, "unit=0"),
        ({"warmup": float("nan"), "total": 8}, "warmup=nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        cosine(0, **settings)


def test_wsd_refuses_a_decay_that_does_not_fit():
    with pytest.raises(ConfigError, match="decay=7 must be above 0 and fit"):
        wsd(0, warmup=2, total=8, decay=7)
    with pytest.raises(ConfigError, match="decay=0"):
        wsd(0, warmup=2, total=8, decay=0)
    with pytest.raises(ConfigError, match="shape='exp'"):
        wsd(0, warmup=2, total=8, decay=2, shape="exp")
    with pytest.raises(ConfigError, match="x=-1"):
        cosine(-1, warmup=2, total=8)
