from fractions import Fraction

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import (
    SCHEDULES,
    bubble_fraction,
    check_microbatches,
    legal_microbatches,
    peak_in_flight,
    stages_of_rank,
    stages_per_rank,
    traits,
)


@pytest.mark.parametrize(
    ("p", "m", "plain", "interleaved", "zero"),
    [(4, 8, 0.375, 0.1875, 0.125), (8, 32, 0.2188, 0.1094, 0.0729), (16, 128, 0.1172, 0.0586, 0.0391)],
)
def test_published_bubbles(p, m, plain, interleaved, zero):
    assert round(float(bubble_fraction("gpipe", ranks=p, microbatches=m)), 4) == plain
    assert round(float(bubble_fraction("1f1b", ranks=p, microbatches=m)), 4) == plain
    for name in ("interleaved_1f1b", "looped_bfs"):
        assert round(float(bubble_fraction(name, ranks=p, microbatches=m, stages=2)), 4) == interleaved
    assert round(float(bubble_fraction("zero_bubble", ranks=p, microbatches=m)), 4) == zero
    for name in ("zbv", "dualpipev"):
        assert bubble_fraction(name, ranks=p, microbatches=m, stages=2) < Fraction(p - 1, 3 * m)


def test_no_formula_where_the_pipeline_never_fills():
    assert bubble_fraction("zbv", ranks=4, microbatches=6, stages=2) is None
    assert bubble_fraction("1f1b", ranks=4, microbatches=3) is None
    assert bubble_fraction("gpipe", ranks=4, microbatches=1) == 3


@pytest.mark.parametrize(
    ("schedule", "v", "expected"),
    [
        ("gpipe", 1, [[0], [1], [2], [3]]),
        ("interleaved_1f1b", 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("looped_bfs", 3, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
        ("zbv", 2, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("dualpipev", 2, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_placement(schedule, v, expected):
    assert [stages_of_rank(schedule, rank, ranks=4, stages=v) for rank in range(4)] == expected


@pytest.mark.parametrize(
    ("schedule", "p", "v", "legal"),
    [
        ("gpipe", 4, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ("1f1b", 4, 1, [4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ("interleaved_1f1b", 4, 2, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]),
        ("zero_bubble", 2, 1, [1, 2, 3, 4, 6, 8, 10, 12]),
        ("zbv", 4, 2, list(range(1, 13))),
        ("dualpipev", 4, 2, [8, 9, 10, 11, 12]),
    ],
)
def test_legal_microbatches(schedule, p, v, legal):
    assert legal_microbatches(schedule, ranks=p, stages=v, up_to=12) == legal


def test_refusals_list_what_is_legal():
    with pytest.raises(ConfigError, match=r"num_microbatches=3 must be at least strategy.pipeline_parallel_size=4"):
        check_microbatches("1f1b", 3, ranks=4, stages=1)
    with pytest.raises(ConfigError, match=r"num_microbatches=2 must be .*; use 4 or 8\.$"):
        check_microbatches("1f1b", 2, ranks=4, stages=1, rows=8)
    with pytest.raises(ConfigError, match=r"8 rows cannot be cut into strategy.num_microbatches=6.*use 4 or 8, or"):
        check_microbatches("1f1b", 6, ranks=4, stages=1, rows=8)
    with pytest.raises(ConfigError, match="use schedule=gpipe or a batch of at least 8 rows"):
        check_microbatches("dualpipev", 4, ranks=4, stages=2, rows=4)
    with pytest.raises(ConfigError, match=r"num_microbatches=0 must be a whole number"):
        check_microbatches("gpipe", 0, ranks=4, stages=1)
    with pytest.raises(ConfigError, match=r"stages_per_rank=3 does not fit strategy.schedule=zbv, which has 2"):
        stages_per_rank("zbv", 3)
    with pytest.raises(ConfigError, match="stages_per_rank=0 must be a whole number"):
        stages_per_rank("looped_bfs", 0)
    with pytest.raises(ConfigError, match=r"schedule='2f2b' is unknown; use one of gpipe, 1f1b, .*dualpipev"):
        traits("2f2b")


def test_default_stages_per_rank():
    assert {name: stages_per_rank(name) for name in SCHEDULES} == {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved_1f1b": 2,
        "looped_bfs": 2,
        "zero_bubble": 1,
        "zbv": 2,
        "dualpipev": 2,
    }
    assert stages_per_rank("zero_bubble", 2) == 2


@pytest.mark.parametrize(
    ("schedule", "v", "expected"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
        ("looped_bfs", 2, [16, 16, 16, 16]),
        ("zero_bubble", 1, [4, 4, 4, 4]),
        ("zbv", 2, [8, 8, 8, 8]),
        ("dualpipev", 2, [9, 9, 9, 9]),
    ],
)
def test_peak_in_flight_at_four_ranks_and_eight_microbatches(schedule, v, expected):
    assert [peak_in_flight(schedule, r, ranks=4, microbatches=8, stages=v) for r in range(4)] == expected
