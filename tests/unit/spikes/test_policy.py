"""The rollback policy, by hand: snapshots every 25 updates, one data position an update unless said otherwise."""

from __future__ import annotations

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import RobustRule, RollbackPolicy, SkipLedger, SnapshotPoint, SpikeDetector, Verdict


def verdict(step, *, began=None, kind="jump"):
    return Verdict(
        kind=kind,
        step=step,
        value=9.0,
        z=12.0,
        threshold=4.0,
        streak=1,
        began=step if began is None else began,
        reason=f"Update {step}: loss 9.",
    )


def points(*steps, per_update=1):
    return [SnapshotPoint(step, step * per_update) for step in steps]


POLICY = RollbackPolicy(max_rollbacks=4, distance=25, growth=2.0, stretch=200)


def test_the_first_rollback_goes_just_behind_the_bad_window():
    decision = POLICY.roll_back(
        SkipLedger(), verdict=verdict(160), snapshots=points(100, 150, 125), position=160, loss=9.0, grad_norm=3.0
    )
    assert decision.restore == SnapshotPoint(150, 150)
    assert decision.stop is None
    skip = decision.skip
    assert (skip.step, skip.low, skip.high, skip.spike) == (150, 150, 160, 160)
    assert (skip.kind, skip.loss, skip.grad_norm, skip.z, skip.lr_factor) == ("jump", 9.0, 3.0, 12.0, 1.0)


@pytest.mark.parametrize(
    ("began", "restored"),
    [(151, 150), (150, 125), (126, 125), (125, 100), (90, 100)],  # the last: none is safe, the oldest has to do
)
def test_snapshots_from_within_the_spike_are_not_restored(began, restored):
    """Update 151 is computed with the weights after 150 updates, update 150 is not."""
    decision = POLICY.roll_back(
        SkipLedger(), verdict=verdict(160, began=began), snapshots=points(100, 125, 150), position=160
    )
    assert decision.restore.step == restored


def test_the_distance_grows_both_ways_until_it_is_enough():
    ledger, seen = SkipLedger(), []
    position = 160
    for _ in range(4):
        decision = POLICY.roll_back(
            ledger, verdict=verdict(160), snapshots=points(*range(0, 151, 25)), position=position
        )
        ledger = ledger.added(decision.skip)
        seen.append((decision.restore.step, decision.skip.high - position))
        # Update 160 spikes again: it now reads this much further on.
        position = decision.skip.high + 160 - decision.restore.step
    # Weights from before update 160 - 25, - 50, - 100, so after 134, 109 and 59 updates at most.
    assert seen == [(150, 0), (125, 25), (100, 50), (50, 100)]
    decision = POLICY.roll_back(ledger, verdict=verdict(160), snapshots=points(0, 150), position=position)
    assert decision.skip is None
    assert decision.restore == SnapshotPoint(150, 150)
    assert "spike 5 within stretches of 200 updates, and rollback.max_rollbacks=4." in decision.stop
    assert "Update 150 is restored and training stops;" in decision.stop
    assert decision.stop.endswith(f"look at the data from position 150 to {position}.")


def test_a_stop_leaves_the_newest_safe_weights():
    policy = RollbackPolicy(max_rollbacks=0)
    decision = policy.roll_back(
        SkipLedger(), verdict=verdict(160, began=150), snapshots=points(100, 125, 150), position=160
    )
    assert decision.stop is not None
    assert decision.restore == SnapshotPoint(125, 125)


def test_positions_count_microbatches():
    policy = RollbackPolicy(distance=10)
    first = policy.roll_back(
        SkipLedger(),
        verdict=verdict(160),
        snapshots=points(150, per_update=4),
        position=640,
        positions_per_update=4,
    )
    assert (first.skip.low, first.skip.high) == (600, 640)
    second = policy.roll_back(
        SkipLedger([first.skip]),
        verdict=verdict(155),
        snapshots=points(100, 150, per_update=4),
        position=660,
        positions_per_update=4,
    )
    assert (second.restore.step, second.skip.low, second.skip.high) == (100, 400, 700)


def test_a_stretch_ends_when_the_run_has_gone_on_well():
    policy = RollbackPolicy(max_rollbacks=2, stretch=100)
    ledger = SkipLedger()
    for spike in (150, 240):  # 90 apart: one stretch
        skip = policy.roll_back(ledger, verdict=verdict(spike), snapshots=points(spike - 10), position=spike).skip
        ledger = ledger.added(skip)
    assert policy.in_stretch(ledger, 340) == 2
    assert policy.in_stretch(ledger, 341) == 0
    assert policy.in_stretch(ledger, 100) == 2  # behind an earlier spike, after going far back
    assert policy.roll_back(ledger, verdict=verdict(340), snapshots=points(330), position=340).stop is not None
    assert policy.roll_back(ledger, verdict=verdict(341), snapshots=points(330), position=341).stop is None


def test_the_whole_run_has_a_limit_too():
    policy = RollbackPolicy(max_rollbacks_in_all=3, stretch=1)
    ledger = SkipLedger()
    for spike in (100, 200, 300):
        ledger = ledger.added(
            policy.roll_back(ledger, verdict=verdict(spike), snapshots=points(spike - 1), position=spike).skip
        )
    decision = policy.roll_back(ledger, verdict=verdict(400), snapshots=points(399), position=400)
    assert "spike 4 of the run, and rollback.max_rollbacks_in_all=3." in decision.stop


def test_a_spike_before_any_snapshot_stops_the_run():
    decision = POLICY.roll_back(SkipLedger(), verdict=verdict(3, kind="nonfinite"), snapshots=[], position=3)
    assert decision.restore is None
    assert decision.skip is None
    assert decision.stop.startswith("Update 3: loss 9. There is no snapshot to go back to yet")


@pytest.mark.parametrize(
    ("lr_updates", "in_force"),
    [(None, [(149, 1.0), (150, 0.5), (159, 0.5), (160, 1.0)]), (30, [(149, 1.0), (150, 0.5), (179, 0.5), (180, 1.0)])],
)
def test_the_learning_rate_is_cut_for_a_while(lr_updates, in_force):
    policy = RollbackPolicy(lr_factor=0.5, lr_updates=lr_updates)
    skip = policy.roll_back(SkipLedger(), verdict=verdict(160), snapshots=points(150), position=160).skip
    assert [(u, SkipLedger([skip]).lr_factor(u)) for u, _ in in_force] == in_force


def test_dropping_the_same_update_again_and_again():
    """In mode skip nothing goes back: update 7 is tried with other data until it is enough."""
    policy, ledger = RollbackPolicy(max_rollbacks=2), SkipLedger()
    for position in (28, 32):
        decision = policy.drop(ledger, verdict=verdict(7), position=position, positions_per_update=4)
        assert decision.restore is None
        assert (decision.skip.step, decision.skip.low, decision.skip.high) == (6, position - 4, position)
        ledger = ledger.added(decision.skip)
    assert ledger.ranges == ((24, 32),)
    assert "rollback.max_rollbacks=2" in policy.drop(ledger, verdict=verdict(7), position=36).stop


def test_with_the_detector_on_the_same_bad_data_again_and_again():
    """A toy run: data from position 160 to 199 gives a loss of 9, and so do weights that have trained on it."""
    policy, detector, ledger = RollbackPolicy(distance=16), SpikeDetector(RobustRule(patience=2)), SkipLedger()
    step, position, poisoned = 0, 0, False
    snapshots: list[tuple[SnapshotPoint, dict]] = []
    trained = []
    while step < 250:
        position = ledger.next_position(position)
        step, poisoned = step + 1, poisoned or 160 <= position < 200
        verdict = detector.observe(9.0 if poisoned else 3.0 + 0.01 * (position % 7), step=step)
        trained.append(position)
        position += 1
        if verdict.is_spike:
            decision = policy.roll_back(
                ledger, verdict=verdict, snapshots=[point for point, _ in snapshots], position=position
            )
            assert decision.stop is None, decision.stop
            ledger = ledger.added(decision.skip)
            snapshots = [(point, state) for point, state in snapshots if point <= decision.restore]
            detector.load_state_dict(snapshots[-1][1])
            step, position, poisoned = decision.restore.step, decision.restore.position, False
            trained = [p for p in trained if p < position]
        elif verdict.is_accepted and step % 10 == 0:
            snapshots.append((SnapshotPoint(step, position), detector.state_dict()))
    assert not set(trained) & set(range(160, 200))
    assert len(trained) == len(set(trained)) == 250
    # Read to 162; then to 164 and 16 more; then to 182 and 32 more.
    assert [entry.high for entry in ledger.entries] == [162, 180, 214]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_rollbacks": -1}, r"rollback\.max_rollbacks=-1 must be"),
        ({"max_rollbacks_in_all": 1.0}, r"rollback\.max_rollbacks_in_all=1\.0"),
        ({"stretch": 0}, r"rollback\.stretch=0"),
        ({"distance": -1}, r"rollback\.distance=-1"),
        ({"growth": 0.5}, r"rollback\.growth=0\.5 must be a finite number of at least 1"),
        ({"growth": 11}, r"rollback\.growth=11 must be at most 10"),
        ({"lr_factor": 0.0}, r"rollback\.lr_factor=0\.0"),
        ({"lr_factor": 1.5}, r"rollback\.lr_factor=1\.5 must be at most 1"),
        ({"lr_factor": 0.5, "lr_updates": 0}, r"rollback\.lr_updates=0"),
        ({"lr_updates": 10}, r"rollback\.lr_updates=10 has no effect with rollback\.lr_factor=1"),
    ],
)
def test_impossible_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        RollbackPolicy(**settings)


def test_the_distance_stays_finite():
    assert RollbackPolicy(distance=25, growth=10).further(5000) == 1_000_000
    assert RollbackPolicy(distance=0, growth=10).further(5000) == 0
