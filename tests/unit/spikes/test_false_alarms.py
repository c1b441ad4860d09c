"""How often the detector cries wolf: on heavy-tailed noise against a bound, and on recorded curves of real runs."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from scipy import stats

from lit_pretrain.spikes import RobustRule, SpikeDetector

DEGREES = 3
SIGMA = 0.05  # of the curve's noise
# What a median absolute deviation, scaled for a normal, sees in Student's t.
ROBUST_SIGMA = stats.t.ppf(0.75, DEGREES) / stats.norm.ppf(0.75)


def heavy_tailed(n, seed):
    return (3.0 + SIGMA * np.random.default_rng(seed).standard_t(DEGREES, n)).tolist()


def alarms(rule, losses, kind):
    detector = SpikeDetector(rule)
    return sum(detector.observe(loss, step=i).kind == kind for i, loss in enumerate(losses))


def expected_rates(rule):
    """Rates of jumps and of shifts per update, with the sampling error of level and sigma.

    A median of n draws scatters by 1 / (2 f(0) sqrt n), a median absolute deviation by 1 / (4 f(m) sqrt n) with m the
    upper quartile (asymptotic, f the density). Both are taken as normal and the rates averaged over them. The level is
    the lower of two such medians, of n and of n/2: its mean lies under 0 by sqrt((v_n/2 - v_n) / (2 pi)), which is
    half the mean difference of two normals that share half of their draws.
    """
    m, n = stats.t.ppf(0.75, DEGREES), rule.window
    v_all, v_half = (1 / (2 * stats.t.pdf(0, DEGREES)) ** 2 / k for k in (n, n / 2))
    shift_of_level = -math.sqrt((v_half - v_all) / (2 * math.pi))
    level_sd, mad_sd = math.sqrt(v_half), 1 / (4 * stats.t.pdf(m, DEGREES) * math.sqrt(n)) / m
    nodes, weights = np.polynomial.hermite_e.hermegauss(21)
    weights = weights / weights.sum()
    level = shift_of_level + level_sd * nodes[:, None]
    sigma = ROBUST_SIGMA * np.maximum(1 + mad_sd * nodes[None, :], 0.2)
    p = stats.t.sf(level + rule.threshold * sigma, DEGREES)
    q = stats.t.sf(level + rule.threshold * sigma * math.sqrt(math.pi / 2 / rule.recent), DEGREES)
    # A shift: the newest is out, and so are half of the others.
    majority = q * stats.binom.sf(rule.recent // 2 - 1, rule.recent - 1, q)
    both = weights[:, None] * weights[None, :]
    return float((both * p**rule.patience).sum()), float((both * majority).sum())


def test_the_rate_of_false_jumps_is_what_the_tails_say():
    """At 3 sigmas, two in a row, there are enough of them to count."""
    rule = RobustRule(threshold=3.0, patience=2, recent=1, min_rise=0.0)
    rate, _ = expected_rates(rule)
    n = 20_000
    count = alarms(rule, heavy_tailed(n, seed=1), "jump")
    assert rate * n > 8
    # Streaks hardly overlap: Poisson. Four of its sigmas, and a factor 1.5 for the asymptotic formulas and for the
    # window, which misses what was not accepted and so sees a little less noise.
    assert rate * n / 1.5 - 4 * math.sqrt(rate * n) <= count <= 1.5 * rate * n + 4 * math.sqrt(rate * n)


def test_the_rate_of_false_shifts_is_what_the_tails_say():
    rule = RobustRule(threshold=4.0, patience=50, min_rise=0.0)
    _, rate = expected_rates(rule)
    n = 20_000
    count = alarms(rule, heavy_tailed(n, seed=2), "shift")
    assert rate * n > 5
    # Neighbouring medians share draws, so alarms come in clumps of up to `recent`: variance recent x Poisson's.
    spread = 4 * math.sqrt(rule.recent * rate * n)
    assert max(1, rate * n / 2 - spread) <= count <= 1.5 * rate * n + spread


def test_the_default_rule_hardly_ever_cries_wolf_on_heavy_tails():
    rule = RobustRule()
    jumps, shifts = expected_rates(rule)
    assert jumps + shifts < 5e-5
    n = 20_000
    losses = heavy_tailed(n, seed=3)
    assert max(losses) > 3.0 + 20 * SIGMA  # the noise does have outliers that a Gaussian never has
    detector = SpikeDetector(rule)
    verdicts = [detector.observe(loss, step=i) for i, loss in enumerate(losses)]
    assert sum(v.kind == "suspect" for v in verdicts) > 20
    # Chance of more, were the rate right: under 1 in 10,000.
    allowed = stats.poisson.ppf(1 - 1e-4, (jumps + shifts) * n) * rule.recent
    assert sum(v.is_spike for v in verdicts) <= allowed


def curve(repository, name):
    with (repository / "tests" / "data" / name).open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows], [float(row["grad_norm"]) for row in rows]


# Runs of the demo's model; the first two recorded every tenth update. In the last, update 120 meets a batch 0.7 nats
# above its neighbours, and the norm jumps once to 5 x its median early on: out of the ordinary, and gone at once.
CURVES = {
    "curve_llama_1m_300_updates.csv": 0,
    "curve_llama_1m_1900_updates.csv": 0,
    "curve_llama_1m_every_update.csv": 2,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("rule", ["robust", "mean", RobustRule(window=50, min_steps=10)], ids=["robust", "mean", "50"])
def test_no_alarm_on_a_recorded_curve(repository, rule, name):
    losses, norms = curve(repository, name)
    assert len(losses) >= 30
    detector = SpikeDetector(rule)
    verdicts = [
        detector.observe(x, step=i, grad_norm=norm) for i, (x, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    assert [v.reason for v in verdicts if v.is_spike] == []
    assert sum(v.kind == "suspect" for v in verdicts) <= CURVES[name]


@pytest.mark.parametrize("name", ["curve_llama_1m_1900_updates.csv", "curve_llama_1m_every_update.csv"])
@pytest.mark.parametrize("at", [60, 90, 120, 150, 175])
def test_a_nat_more_is_seen_in_a_recorded_curve(repository, name, at):
    """The noise is 0.1 to 0.2 nats, and the curve is still falling."""
    losses, norms = curve(repository, name)
    detector = SpikeDetector()
    spikes = [
        v.step
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
        if (v := detector.observe(loss + (i >= at), step=i, grad_norm=norm)).is_spike
    ]
    assert at < spikes[0] <= at + 8


MEMORISED = "curve_classifier_every_update.csv"  # of `benchmarks.classifier_curve`: 2.3 down to 1e-4, and 0.1 at times


def test_a_loss_that_has_fallen_to_almost_nothing_gives_no_alarm(repository):
    losses, norms = curve(repository, MEMORISED)
    late = losses[1000:]
    assert np.quantile(late, 0.99) / np.quantile(late, 0.5) > 20  # tails as they are meant
    detector = SpikeDetector()
    verdicts = [
        detector.observe(x, step=i, grad_norm=norm) for i, (x, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    assert [v.reason for v in verdicts if v.is_spike] == []


@pytest.mark.parametrize("at", [600, 1200, 1999])
@pytest.mark.parametrize("height", [0.7, 2.3])
def test_but_weights_that_are_lost_are_seen_there(repository, at, height):
    """2.3 is the loss of guessing at random."""
    losses, _ = curve(repository, MEMORISED)
    detector = SpikeDetector()
    for i, loss in enumerate(losses[:at]):
        detector.observe(loss, step=i)
    kinds = [detector.observe(height, step=at + i).kind for i in range(3)]
    assert kinds == ["suspect", "suspect", "jump"]


@pytest.mark.parametrize(
    ("window", "loss", "kind"),
    [
        ([0.0] * 60 + [0.001] * 40, 0.0039, "normal"),  # under 4 x the largest
        ([0.0] * 60 + [0.001] * 40, 0.0041, "jump"),
        ([0.0] * 100, 9e-7, "normal"),
        ([0.0] * 100, 2e-6, "jump"),
        ([-3.0, -3.1] * 50, -1.0, "jump"),  # by differences alone
        ([1e-3, 2e-3] * 50, 0.0079, "normal"),  # the threshold by differences is 0.00595
        ([1e-3, 2e-3] * 50, 0.0081, "jump"),
    ],
)
def test_losses_at_zero_and_below(window, loss, kind):
    detector = SpikeDetector(RobustRule(patience=1, recent=1))
    for i, value in enumerate(window):
        detector.observe(value, step=i)
    detector.load_state_dict({**detector.state_dict(), "losses": window})
    assert detector.observe(loss, step=100).kind == kind
