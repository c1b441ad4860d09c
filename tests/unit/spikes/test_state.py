"""A detector continued from its state judges as one that never stopped."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_pretrain.spikes import MeanRule, RobustRule, SpikeDetector

RULES = {
    "robust": RobustRule(window=20, min_steps=5, recent=5, patience=2),
    "mean": MeanRule(window=20, min_steps=5, patience=2),
}
# Ordinary losses around 3, and now and then something else.
LOSSES = st.one_of(
    st.floats(2.8, 3.2),
    st.floats(2.8, 3.2),
    st.floats(-1e308, 1e308),
    st.sampled_from([math.nan, math.inf, 0.0, 5e-324, 30.0]),
)
NORMS = st.one_of(st.none(), st.floats(0.5, 2.0), st.sampled_from([0.0, 100.0, math.inf, 5e-324]))
STEPS = st.lists(st.tuples(LOSSES, NORMS), min_size=1, max_size=60)


def observe(detector, steps, start=0):
    # As text: NaN is equal to itself there, and -0.0 differs from 0.0.
    return [repr(detector.observe(loss, step=start + i, grad_norm=norm)) for i, (loss, norm) in enumerate(steps)]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, data=st.data())
def test_continuing_from_the_state_gives_the_same_verdicts(rule, steps, data):
    cut = data.draw(st.integers(0, len(steps)))
    whole = SpikeDetector(RULES[rule])
    expected = observe(whole, steps)
    first, second = SpikeDetector(RULES[rule]), SpikeDetector(RULES[rule])
    begun = observe(first, steps[:cut])
    text = json.dumps(first.state_dict(), allow_nan=False)  # exact in JSON, and nothing in it that is not finite
    observe(second, steps[:3])  # whatever it knew before is forgotten
    second.load_state_dict(json.loads(text))
    assert begun + observe(second, steps[cut:], cut) == expected
    assert second.state_dict() == whole.state_dict()


def test_a_state_is_a_copy():
    detector = SpikeDetector(RULES["robust"])
    observe(detector, [(3.0, 1.0)] * 10)
    state = detector.state_dict()
    observe(detector, [(3.1, 1.1)] * 5)
    assert state["losses"] == [3.0] * 10
    detector.load_state_dict(state)
    observe(detector, [(9.0, 1.1)] * 5)
    assert state == {"losses": [3.0] * 10, "norms": [1.0] * 10, "recent": [3.0] * 5, "streak": 0}


def test_a_narrower_window_keeps_the_newest():
    wide = SpikeDetector(RobustRule(window=100))
    observe(wide, [(3.0 + i / 1000, None) for i in range(100)])
    narrow = SpikeDetector(RobustRule(window=10, min_steps=5, recent=3))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.state_dict()["losses"] == [3.0 + i / 1000 for i in range(90, 100)]


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_what_is_not_accepted_leaves_no_trace_in_the_window(steps):
    detector = SpikeDetector(RULES["robust"])
    accepted = []
    for i, (loss, norm) in enumerate(steps):
        if detector.observe(loss, step=i, grad_norm=norm).is_accepted:
            accepted.append(loss)
    assert detector.state_dict()["losses"] == accepted[-20:]
