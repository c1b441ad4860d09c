from itertools import combinations

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline_layers import layer_range, split_layers


@pytest.mark.parametrize(
    ("n_layer", "stages", "costs", "expected"),
    [
        (80, 4, (0, 0), (20, 20, 20, 20)),
        (4, 4, (0, 0), (1, 1, 1, 1)),
        (8, 3, (0, 0), (2, 3, 3)),  # equals go to the later stage, which holds fewer microbatches
        (7, 2, (0, 0), (3, 4)),
        (8, 3, (0, 1), (3, 3, 2)),
        (8, 4, (1, 1), (1, 2, 3, 2)),  # work 2 2 3 3
        (12, 4, (1, 3), (3, 4, 4, 1)),
        (32, 4, (0, 2.3), (8, 9, 9, 6)),
        (6, 2, (0, 10), (5, 1)),  # a head dearer than all layers still keeps one
        (5, 1, (0, 3), (5,)),
    ],
)
def test_hand_table(n_layer, stages, costs, expected):
    assert split_layers(n_layer, stages, embed_cost=costs[0], head_cost=costs[1]) == expected


def test_no_split_with_a_layer_on_each_stage_has_a_cheaper_dearest_stage():
    for n_layer, stages, embed, head in [(9, 4, 0.0, 2.5), (10, 3, 1.5, 0.5), (11, 5, 0.3, 1.7), (8, 3, 4.0, 4.0)]:

        def dearest(counts, embed=embed, head=head):
            costs = [float(c) for c in counts]
            costs[0] += embed
            costs[-1] += head
            return max(costs)

        every = [
            tuple(b - a for a, b in zip((0, *cuts), (*cuts, n_layer), strict=True))
            for cuts in combinations(range(1, n_layer), stages - 1)
        ]
        best = min(dearest(counts) for counts in every)
        assert dearest(split_layers(n_layer, stages, embed_cost=embed, head_cost=head)) == best


def test_the_chapters_eighty_layers_over_four_ranks():
    counts = split_layers(80, 4)
    assert [(r[0] + 1, r[-1] + 1) for r in (layer_range(counts, s) for s in range(4))] == [
        (1, 20),
        (21, 40),
        (41, 60),
        (61, 80),
    ]


def test_own_cut_is_taken_as_it_is():
    assert split_layers(8, 3, head_cost=5, cut=[1, 1, 6]) == (1, 1, 6)
    assert split_layers(8, 3, cut=[4, 4, 0]) == (4, 4, 0)


@pytest.mark.parametrize("cut", [[3, 3], [3, 3, 3], [4, 0, 4], [4, 5, -1], [2.0, 3, 3], [True, 4, 3]])
def test_cut_that_does_not_fit_is_refused_with_an_example(cut):
    with pytest.raises(ConfigError, match=r"layers_per_stage=.* 3 counts .* sum 8 .*for example \[2, 3, 3\]"):
        split_layers(8, 3, cut=cut)


def test_fewer_layers_than_stages_is_refused():
    with pytest.raises(ConfigError, match="at least 4 layers, but the model has 3; use at most 3 stages"):
        split_layers(3, 4)
