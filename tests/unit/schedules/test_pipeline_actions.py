from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lit_pretrain.schedules.pipeline import (
    SCHEDULES,
    bubble_fraction,
    legal_microbatches,
    peak_in_flight,
    stages_of_rank,
)
from lit_pretrain.schedules.pipeline_actions import Action, actions, all_actions
from lit_pretrain.schedules.pipeline_time import UNIT, simulate, simulated_in_flight

CASES = [
    (name, ranks, stages, microbatches)
    for name, own in SCHEDULES.items()
    for ranks in (1, 2, 3, 4, 8)
    for stages in ([own.stages_per_rank] if own.stages_per_rank else [1, 2, 3])
    for microbatches in legal_microbatches(name, ranks=ranks, stages=stages, up_to=17)
]


def words(order):
    return " ".join(str(action) for action in order)


def test_hand_orders():
    assert words(actions("gpipe", 0, ranks=2, microbatches=2)) == "0F0 0F1 0B0 0B1"
    assert words(actions("1f1b", 0, ranks=2, microbatches=3)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert words(actions("1f1b", 1, ranks=2, microbatches=3)) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert words(actions("looped_bfs", 1, ranks=2, microbatches=2, stages=2)) == "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"
    assert words(actions("interleaved_1f1b", 1, ranks=2, microbatches=2, stages=2)) == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )
    assert words(actions("zero_bubble", 1, ranks=2, microbatches=2)) == "1F0 1I0 1F1 1I1 1W0 1W1"
    assert words(actions("zbv", 1, ranks=2, microbatches=3, stages=2)) == (
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"
    )


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_piece_of_work_once_and_never_a_deadlock(name):
    for case in (c for c in CASES if c[0] == name):
        _, ranks, stages, microbatches = case
        orders = all_actions(name, ranks=ranks, microbatches=microbatches, stages=stages)
        simulate(orders)  # raises on a deadlock
        for rank, order in enumerate(orders):
            assert len(set(order)) == len(order), case
            halves = [(k, a.stage, a.microbatch) for a in order for k in ("IW" if a.kind == "B" else a.kind)]
            own = stages_of_rank(name, rank, ranks=ranks, stages=stages)
            assert sorted(halves) == sorted((k, s, i) for k in "FIW" for s in own for i in range(microbatches)), case


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_simulated_time_and_memory_follow_the_formulas(name):
    seen = 0
    for case in (c for c in CASES if c[0] == name):
        _, ranks, stages, microbatches = case
        expected = bubble_fraction(name, ranks=ranks, microbatches=microbatches, stages=stages)
        if expected is None:
            continue
        if name in ("interleaved_1f1b", "zero_bubble") and microbatches % ranks:
            continue  # rounds of unequal length: the formula holds for whole rounds
        orders = all_actions(name, ranks=ranks, microbatches=microbatches, stages=stages)
        assert simulate(orders).bubble == pytest.approx(float(expected), abs=1e-12), case
        held = [simulated_in_flight(order) for order in orders]
        assert held == [
            peak_in_flight(name, rank, ranks=ranks, microbatches=microbatches, stages=stages) for rank in range(ranks)
        ], case
        seen += 1
    assert seen >= 10


def torch_order(name, ranks, stages, microbatches):
    """What torch's own schedule would run, on stages that hold nothing."""
    kind = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "looped_bfs": torch_schedules.ScheduleLoopedBFS,
        "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipev": torch_schedules.ScheduleDualPipeV,
    }[name]
    hollow = [
        SimpleNamespace(group_size=ranks, num_stages=ranks * stages, group_rank=0, submod=None, stage_index=s)
        for s in stages_of_rank(name, 0, ranks=ranks, stages=stages)
    ]
    return kind(hollow[0] if name == "gpipe" else hollow, microbatches).pipeline_order


def flat(order):
    for action in order:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        if action.sub_actions:
            yield from flat(action.sub_actions)
        else:
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "1f1b"])  # torch runs 1F1B by hand, without a list
def test_orders_are_those_that_torch_runs(name):
    for case in (c for c in CASES if c[0] == name):
        _, ranks, stages, microbatches = case
        theirs = torch_order(name, ranks, stages, microbatches)
        for rank in range(ranks):
            ours = actions(name, rank, ranks=ranks, microbatches=microbatches, stages=stages)
            assert ours == list(flat(theirs[rank])), (case, rank)


def test_legal_is_what_torch_accepts():
    for name in (n for n in SCHEDULES if n != "1f1b"):
        for ranks in (1, 2, 3, 4):
            stages = SCHEDULES[name].default_stages_per_rank
            legal = legal_microbatches(name, ranks=ranks, stages=stages, up_to=13)
            accepted = []
            for microbatches in range(1, 14):
                try:
                    torch_order(name, ranks, stages, microbatches)
                except ValueError:
                    continue
                accepted.append(microbatches)
            assert legal == accepted, (name, ranks)


def test_a_deadlock_is_noticed():
    with pytest.raises(ValueError, match="deadlocks before 0B0, 1F0"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]])


def test_simulation_by_hand_with_sending_and_unequal_work():
    orders = all_actions("gpipe", ranks=2, microbatches=1)
    line = simulate(orders, work={**UNIT, "F": 2.0, "B": 5.0}, send=0.5)
    # 0: F 0-2; 1: F 2.5-4.5, B 4.5-9.5; 0: B 10-15
    assert line.makespan == 15.0
    assert line.start[Action("F", 1, 0)] == 2.5
    assert line.bubble == pytest.approx(15 / 7 - 1)
