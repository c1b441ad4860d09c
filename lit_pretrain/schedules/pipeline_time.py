"""When each piece of a pipeline's work runs and what it keeps alive, by simulation; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_pretrain.schedules.pipeline_actions import Action, Kind

UNIT: Mapping[Kind, float] = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Work of each kind where forward, input gradient and weight gradient take equally long."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step.

    Args:
        start: When each piece begins.
        finish: When each piece ends.
        makespan: When the last rank is done.
        busy: Time each rank works.
    """

    start: Mapping[Action, float]
    finish: Mapping[Action, float]
    makespan: float
    busy: Sequence[float]

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, on average over the ranks."""
        ideal = sum(self.busy) / len(self.busy)
        return (self.makespan - ideal) / ideal


def simulate(orders: Sequence[Sequence[Action]], *, work: Mapping[Kind, float] = UNIT, send: float = 0.0) -> Timeline:
    """Run every rank's actions in their order, each as soon as its rank is free and what it needs is there.

    Args:
        orders: Actions of each rank.
        work: Time of each kind, on every stage.
        send: Time from a stage's end to its neighbour's on another rank.

    Raises:
        ValueError: Some action waits for one that never comes: the order deadlocks.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    start: dict[Action, float] = {}
    finish: dict[Action, float] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    last = max(rank_of)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                ready = _ready(action, finish, rank_of, last=last, send=send)
                if ready is None:
                    break
                start[action] = max(free[rank], ready)
                free[rank] = finish[action] = start[action] + work[action.kind]
                position[rank] += 1
                moved = True
    stuck = [str(order[position[rank]]) for rank, order in enumerate(orders) if position[rank] < len(order)]
    if stuck:
        raise ValueError(f"the schedule deadlocks before {', '.join(stuck)}")
    busy = [sum(work[action.kind] for action in order) for order in orders]
    return Timeline(start=start, finish=finish, makespan=max(free), busy=busy)


def _ready(
    action: Action, finish: Mapping[Action, float], rank_of: Mapping[int, int], *, last: int, send: float
) -> float | None:
    """When the inputs of an action are there; None while one is not."""
    kind, stage, microbatch = action
    if kind == "W":
        return finish.get(Action("I", stage, microbatch))
    if kind == "F":
        if stage == 0:
            return 0.0
        arrived = finish.get(Action("F", stage - 1, microbatch))
        return None if arrived is None else arrived + send * (rank_of[stage] != rank_of[stage - 1])
    own = finish.get(Action("F", stage, microbatch))
    if own is None or stage == last:
        return own
    above = [finish[a] for k in ("B", "I") if (a := Action(k, stage + 1, microbatch)) in finish]
    return max(own, above[0] + send * (rank_of[stage] != rank_of[stage + 1])) if above else None


def simulated_in_flight(order: Sequence[Action]) -> int:
    """Most forwards of one rank whose activations wait for a backward at once; each is one stage's and microbatch's.

    Activations live from the forward until the whole backward, or until the gradient of the weights. Divide by the
    stages on a rank to compare with a schedule that has one.
    """
    alive = peak = 0
    for action in order:
        if action.kind == "F":
            alive += 1
            peak = max(peak, alive)
        elif action.kind in ("B", "W"):
            alive -= 1
    return peak
