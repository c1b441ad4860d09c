"""Scenarios of the spike detector, by both rules, with the update at which each has to fire."""

from __future__ import annotations

import math
import random

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import MeanRule, RobustRule, SpikeDetector

START = 150  # the event's update: behind a full window


def calm(n=300, level=3.0, sigma=0.1, seed=0):
    noise = random.Random(seed)
    return [level + sigma * noise.gauss(0, 1) for _ in range(n)]


def noisy_start(seed=0):
    """From 11 to 6 in 100 updates, the noise shrinking from 0.5 to 0.1, with a bump on the way."""
    noise = random.Random(seed)
    falling = [max(6.0, 11 - 0.05 * i) + (0.1 + 0.4 * math.exp(-i / 50)) * noise.gauss(0, 1) for i in range(300)]
    return [loss + (0.4 if 60 <= i < 75 else 0.0) for i, loss in enumerate(falling)]


def hyperbola(seed=0):
    """Steep, then flat: a straight line through the window would lie far below its end."""
    noise = random.Random(seed)
    return [6 + 5 / (1 + i / 8) + 0.1 * noise.gauss(0, 1) for i in range(300)]


def lasting_jump(size=1.0, sigma=0.1, seed=0):
    return [loss + (size if i >= START else 0.0) for i, loss in enumerate(calm(sigma=sigma, seed=seed))]


def drift(rate, seed=0):
    return [loss * (1 + rate) ** max(0, i - START + 1) for i, loss in enumerate(calm(220, seed=seed))]


def single(value, at=START):
    return [value if i == at else loss for i, loss in enumerate(calm())]


def improvement(length=1000, seed=0):
    return [loss - (1.5 if START <= i < START + length else 0.0) for i, loss in enumerate(calm(seed=seed))]


def same_batch_again():
    """Every attempt at update 150 meets the same bad batch."""
    return calm()[:START] + [14.0] * 20


def first_spike(rule, losses, norms=None):
    detector = SpikeDetector(rule)
    for i, loss in enumerate(losses):
        verdict = detector.observe(loss, step=i, grad_norm=None if norms is None else norms[i])
        if verdict.is_spike:
            return i, verdict.kind
    return None


nan, inf = math.nan, math.inf

# scenario: losses, what the robust rule says, what the mean rule says
SCENARIOS = {
    "noisy start": (noisy_start(), None, None),
    "noisy start, other noise": (noisy_start(seed=7), None, None),
    "steep, then flat": (hyperbola(), None, None),
    "jump of 1 nat that lasts": (lasting_jump(), (START + 2, "jump"), None),
    "jump of 1 nat under noise of 0.25": (lasting_jump(sigma=0.25), (START + 4, "shift"), None),
    "explosion": (lasting_jump(size=20.0), (START + 2, "jump"), (START, "jump")),
    # 3 x 1.1^k - 3 passes 6 sigmas (0.6) with k = 2; the third in a row is k = 4, in update START + 3. The mean of 100
    # follows the drift: 3 x 1.1^k passes 4 x (3 + sum(3 x 1.1^j - 3, j < k) / 100) with k = 17.
    "drift of 10% an update": (drift(0.10), (START + 3, "jump"), (START + 16, "jump")),
    # The median of 9 lags by 4: 3 x 1.01^(k - 4) - 3 passes 6 x 0.1 x 1.25 / 3 = 0.25 with k = 13.
    "drift of 1% an update": (drift(0.01), (START + 12, "shift"), None),
    "single NaN": (single(nan), (START, "nonfinite"), (START, "nonfinite")),
    "single infinity": (single(inf), (START, "nonfinite"), (START, "nonfinite")),
    "single NaN in the second update": (single(nan, at=1), (1, "nonfinite"), (1, "nonfinite")),
    "single outlier": (single(5.0), None, None),
    "single loss of 14": (single(14.0), None, (START, "jump")),
    "improvement that lasts": (improvement(), None, None),
    "improvement that ends": (improvement(20), None, None),
    "the same batch again and again": (same_batch_again(), (START + 2, "jump"), (START, "jump")),
    "spike before the level is learned": (single(14.0, at=10), None, None),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    losses, robust, mean = SCENARIOS[name]
    found = first_spike("robust", losses)
    if robust is None:
        assert found is None
    else:
        assert found is not None
        assert found[1] == robust[1]
        assert abs(found[0] - robust[0]) <= 2  # the noise may help or hinder by an update or two
    assert first_spike("mean", losses) == mean


def test_gradient_norms_spike_while_the_loss_looks_well():
    losses = calm()
    norms = [math.exp(0.2 * random.Random(i).gauss(0, 1)) for i in range(300)]
    assert first_spike("robust", losses, norms) is None
    spiking = norms[:START] + [10.0] * 3 + norms[START + 3 :]
    assert first_spike("robust", losses, spiking) == (START + 2, "gradient")
    assert first_spike("mean", losses, spiking) is None
    assert first_spike(RobustRule(gradient_factor=None), losses, spiking) is None
    assert first_spike("robust", losses, [*norms[:START], inf, *norms[START + 1 :]]) == (START, "nonfinite")
    assert first_spike("mean", losses, [*norms[:START], nan, *norms[START + 1 :]]) == (START, "nonfinite")


def test_gradient_norms_that_are_noisier_than_the_factor_do_not_spike():
    """The logarithm scatters by 0.7: 4 x the median is 2 sigmas, seen every 20 updates."""
    noise = random.Random(3)
    norms = [math.exp(0.7 * noise.gauss(0, 1)) for _ in range(300)]
    assert sum(norm > 4 for norm in norms) > 3
    assert first_spike(RobustRule(patience=1), calm(), norms) is None


@pytest.mark.parametrize("rule", ["robust", "mean"])
def test_a_spike_that_lasts_never_becomes_normal(rule):
    detector = SpikeDetector(rule)
    kinds = [detector.observe(loss, step=i).kind for i, loss in enumerate([*calm(150), *[30.0] * 500])]
    assert set(kinds[-490:]) == {"jump"}
    assert not detector.observe(3.0, step=651).is_spike


@pytest.mark.parametrize("rule", ["robust", "mean"])
def test_a_nan_blocks_no_further_step(rule):
    detector = SpikeDetector(rule)
    losses = single(nan)
    verdicts = [detector.observe(loss, step=i) for i, loss in enumerate(losses)]
    assert [v.step for v in verdicts if v.is_spike] == [START]
    assert all(v.is_accepted for v in verdicts if v.step != START)


def test_patience_waits_and_says_so():
    detector = SpikeDetector(RobustRule(patience=3, recent=51))
    for i, loss in enumerate(calm(100)):
        detector.observe(loss, step=i)
    first, second, relief, third = (detector.observe(x, step=100) for x in (9.0, 9.0, 3.0, 9.0))
    assert [v.kind for v in (first, second, relief, third)] == ["suspect", "suspect", "normal", "suspect"]
    assert [v.streak for v in (first, second, relief, third)] == [1, 2, 0, 1]
    assert not first.is_spike
    assert not first.is_accepted
    assert "2 in a row, a spike from 3 on" in second.reason


def test_the_mean_rule_by_hand():
    """Losses 1 and 3 in turn: mean 2, threshold 8, exactly reached at first."""
    detector = SpikeDetector("mean")
    for i in range(100):
        detector.observe(1.0 + 2 * (i % 2), step=i)
    verdict = detector.observe(8.0, step=100)
    assert verdict.kind == "normal"
    assert verdict.threshold == 8.0
    # Now one 1 has left and an 8 is in: mean (200 - 1 + 8) / 100 = 2.07, threshold 8.28.
    spike = detector.observe(8.29, step=101)
    assert spike.kind == "jump"
    assert spike.threshold == pytest.approx(8.28, abs=1e-12)
    assert spike.reason == "Update 101: loss 8.29 against 4 x the mean 2.07 of 100 updates."


@pytest.mark.parametrize(
    ("loss", "kind", "threshold"), [(3.889, "normal", 3.88956), (4.033, "normal", 4.03371), (4.035, "jump", 4.03371)]
)
def test_the_robust_rule_by_hand(loss, kind, threshold):
    """Losses 2.9 and 3.1 in turn: level 3, every residual 0.1, so sigma 0.14826 and the threshold 3.88956.

    Their logarithms: level 1.098055, every residual 0.033346, so sigma 0.049439 and the threshold 4.03371.
    """
    detector = SpikeDetector(RobustRule(window=40, patience=1))
    for i in range(40):
        detector.observe(3.0 + 0.1 * (-1) ** i, step=i)
    verdict = detector.observe(loss, step=40)
    assert verdict.kind == kind
    assert verdict.threshold == pytest.approx(threshold, abs=1e-5)
    assert verdict.z == pytest.approx((loss - 3) / 0.14826, abs=1e-9)


@pytest.mark.parametrize(("sigma", "kind", "back"), [(0.05, "jump", 2), (0.25, "shift", 8)])
def test_a_spike_says_when_it_may_have_begun(sigma, kind, back):
    detector = SpikeDetector()
    verdicts = [detector.observe(loss, step=1 + i) for i, loss in enumerate(lasting_jump(sigma=sigma))]
    spike = next(v for v in verdicts if v.is_spike)
    assert spike.kind == kind
    assert spike.step - spike.began == back
    assert spike.began <= START + 1  # the first update of the jump
    assert all(v.began == v.step for v in verdicts if v.is_accepted)


def test_a_curve_without_noise_needs_a_rise_worth_the_name():
    def kind(rise):
        detector = SpikeDetector(RobustRule(patience=1, min_rise=0.05))
        for i in range(100):
            detector.observe(2.0, step=i)
        return detector.observe(2.0 * (1 + rise), step=100).kind

    assert kind(0.04) == "normal"
    assert kind(0.06) == "jump"


@pytest.mark.parametrize("level", [0.0, -3.0, 1e-6, 1e200])
@pytest.mark.parametrize("rule", ["robust", "mean"])
def test_any_level_is_judged_without_an_error(rule, level):
    """Regression losses near zero, negative log-densities, and what overflows when squared."""
    detector = SpikeDetector(rule)
    verdicts = [detector.observe(level * (1 + 0.01 * (-1) ** i), step=i) for i in range(150)]
    assert all(v.is_accepted for v in verdicts)
    assert all(v.z is None or math.isfinite(v.z) for v in verdicts)
    worse = [detector.observe(1e300, step=i) for i in range(3)][-1]
    assert worse.is_spike or (rule == "mean" and level <= 0)


def test_reset_learns_a_new_level():
    detector = SpikeDetector()
    for i, loss in enumerate([*calm(100), *[8.0] * 5]):
        last = detector.observe(loss, step=i)
    assert last.is_spike
    detector.reset()
    assert [detector.observe(8.0 + loss, step=i).is_accepted for i, loss in enumerate(calm(100))] == [True] * 100


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SpikeDetector("median"), r"spikes\.rule='median' is unknown; use robust or mean"),
        (lambda: RobustRule(threshold=0), r"robust\.threshold=0 must be a finite number above 0"),
        (lambda: RobustRule(threshold=nan), r"robust\.threshold=nan must be"),
        (lambda: RobustRule(window=5), r"robust\.window=5 must be a whole number of at least 10"),
        (lambda: RobustRule(window=30, min_steps=31), r"min_steps=31 must not exceed .*window=30"),
        (lambda: RobustRule(patience=0), r"robust\.patience=0 must be"),
        (lambda: RobustRule(patience=True), r"robust\.patience=True must be"),
        (lambda: RobustRule(recent=8), r"robust\.recent=8 must be odd .*; use 9\."),
        (lambda: RobustRule(recent=101), r"robust\.recent=101 must be odd and at most .*; use 99\."),
        (lambda: RobustRule(min_rise=-0.1), r"robust\.min_rise=-0\.1 must be"),
        (lambda: RobustRule(gradient_factor=1.0), r"robust\.gradient_factor=1\.0 must be"),
        (lambda: MeanRule(factor=1.0), r"mean\.factor=1\.0 must be a finite number above 1"),
        (lambda: MeanRule(window=2.5), r"mean\.window=2\.5 must be a whole number"),
        (lambda: MeanRule(min_steps=1), r"mean\.min_steps=1 must be"),
        (lambda: SpikeDetector().load_state_dict({"w": []}), r"keys \['w'\]"),
    ],
)
def test_impossible_settings_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
