"""What each pipeline rank does, in order: one pure function for each schedule; no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from lit_pretrain.schedules.pipeline import check_microbatches, stages_of_rank, traits

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work.

    Args:
        kind: ``F`` forward, ``B`` whole backward, ``I`` gradient of the input, ``W`` gradient of the weights.
        stage: Global stage.
        microbatch: From 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def actions(schedule: str, rank: int, *, ranks: int, microbatches: int, stages: int = 1) -> list[Action]:
    """The work of one rank in the order in which it is done.

    Args:
        schedule: Its name.
        rank: Pipeline rank.
        ranks: p.
        microbatches: m.
        stages: v, on each rank.

    Raises:
        ConfigError: The schedule cannot run that many microbatches.
    """
    check_microbatches(schedule, microbatches, ranks=ranks, stages=stages)
    own = stages_of_rank(schedule, rank, ranks=ranks, stages=stages)
    if schedule == "gpipe":
        return list(_breadth_first(own, microbatches, reverse=False))
    if schedule == "looped_bfs":
        return list(_breadth_first(own, microbatches, reverse=True))
    if schedule == "1f1b":
        return list(_one_forward_one_backward(own[0], rank, ranks, microbatches))
    if schedule == "zbv":
        return _zbv(own, rank, ranks, microbatches)
    if schedule == "dualpipev":
        return _dualpipev(own, rank, ranks, microbatches)
    return _interleaved(own, rank, ranks, microbatches, split=traits(schedule).splits_backward)


def all_actions(schedule: str, *, ranks: int, microbatches: int, stages: int = 1) -> list[list[Action]]:
    """The work of every rank."""
    return [actions(schedule, rank, ranks=ranks, microbatches=microbatches, stages=stages) for rank in range(ranks)]


def _breadth_first(own: list[int], microbatches: int, *, reverse: bool) -> Iterator[Action]:
    """Every forward before the first backward."""
    for stage in own:
        yield from (Action("F", stage, i) for i in range(microbatches))
    order = range(microbatches)
    for stage in reversed(own):
        yield from (Action("B", stage, i) for i in (reversed(order) if reverse else order))


def _one_forward_one_backward(stage: int, rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """As many forwards as the pipeline behind is deep, then a backward for each forward."""
    ahead = min(microbatches, ranks - rank)
    yield from (Action("F", stage, i) for i in range(ahead))
    for i in range(microbatches):
        yield Action("B", stage, i)
        if ahead + i < microbatches:
            yield Action("F", stage, ahead + i)


def _interleaved(own: list[int], rank: int, ranks: int, microbatches: int, *, split: bool) -> list[Action]:
    """Microbatches go in rounds of about p through the rank's first stage, then through its second, and so on.

    With a split backward a rank starts one forward less ahead for each rank behind it, and its weight gradients lag
    ``rank`` input gradients behind: they fill the time in which it would wait.
    """
    total = len(own) * microbatches
    in_round = microbatches // max(1, microbatches // ranks)
    ahead = min(total, (len(own) - 1) * in_round + (1 if split else 2) * (ranks - 1 - rank))
    order = [(k // in_round) % len(own) for k in range(total)]
    forwards = iter(_numbered("F", [own[i] for i in order]))
    backwards = _numbered("I" if split else "B", [own[-1 - i] for i in order])
    weights = deque(action._replace(kind="W") for action in backwards) if split else deque()

    out = [next(forwards) for _ in range(ahead)]
    for done, backward in enumerate(backwards):
        if done < total - ahead:
            out.append(next(forwards))
        out.append(backward)
        if split and done >= rank:
            out.append(weights.popleft())
    return [*out, *weights]


def _numbered(kind: Kind, stages: list[int]) -> list[Action]:
    """Actions over a sequence of stages, each counting its own microbatches."""
    seen: Counter[int] = Counter()
    out = []
    for stage in stages:
        out.append(Action(kind, stage, seen[stage]))
        seen[stage] += 1
    return out


class _Counting:
    """Writes actions down; each kind counts its microbatches on each stage."""

    def __init__(self) -> None:
        self.out: list[Action] = []
        self.seen: Counter[tuple[str, int]] = Counter()
        self.pending: deque[Action] = deque()  # input gradients whose weight gradients are still to do

    def __call__(self, kinds: str, *stages: int) -> None:
        for stage in stages:
            for kind in kinds:
                self._one(kind, stage)

    def _one(self, kind: str, stage: int) -> None:
        if kind == "B":  # both halves at once
            number = self.seen["I", stage]
            self.seen["W", stage] += 1
            self.seen["I", stage] += 1
            self.out.append(Action("B", stage, number))
            return
        number = self.seen[kind, stage]
        self.seen[kind, stage] += 1
        self.out.append(Action(kind, stage, number))  # type: ignore[arg-type]

    def input_only(self, stage: int) -> None:
        """The gradient of the input now, that of the weights when :meth:`oldest_weight` is called for it."""
        self("I", stage)
        self.pending.append(self.out[-1])

    def oldest_weight(self) -> None:
        if self.pending:
            self.out.append(self.pending.popleft()._replace(kind="W"))


def _zbv(own: list[int], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Down one arm of the V and up the other; weight gradients at once in the steady state, late at the end.

    The order is that for at least 2p-1 microbatches; with fewer, the missing ones drop out.
    """
    down, up = own
    total = max(2 * ranks - 1, microbatches)
    do = _Counting()
    for _ in range(2 * (ranks - rank) - 1):
        do("F", down)
    for _ in range(rank):
        do("F", up, down)
    for _ in range(ranks - rank):
        do("FIW", up)
    while do.seen["F", up] < total:
        if do.seen["F", down] < total:
            do("F", down)
        do("IW", down)
        do("FIW", up)
    for _ in range(rank):
        do("I", down, up)
    for _ in range(ranks - rank):
        do("IW", down)
    for stage in (up, down):
        for _ in range(total - do.seen["W", stage]):
            do("W", stage)
    return [action for action in do.out if action.microbatch < microbatches]


def _dualpipev(own: list[int], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Forwards on one arm of the V go with backwards on the other; the ends use split backwards.

    Where a forward and a backward are meant to overlap, the forward is listed first.
    """
    down, up = own
    behind = ranks - 1 - rank
    do = _Counting()
    for _ in range(2 * behind):
        do("F", down)
    for _ in range(rank + 1):
        do("F", down, up)
    for _ in range(behind):
        do.input_only(up)
        do.oldest_weight()
        do("F", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        do("F", down)
        do("B", up)
        do("F", up)
        do("B", down)
    for _ in range(behind):
        do("B", up)
        do("F", up)
        do("B", down)
    # The second half of the last rank + 1 pairs is split; on even ranks the turn comes between the arms.
    halves = [stage for _ in range(rank + 1) for stage in (up, down)]
    turn = 2 * ((rank + 1) // 2) + (1 if rank % 2 == 0 else 0)
    for k, stage in enumerate(halves):
        (do.input_only if k >= turn else lambda s: do("B", s))(stage)
    for _ in range(behind):
        do.oldest_weight()
        (do.input_only if len(halves) > turn else lambda s: do("B", s))(down)
    while do.pending:
        do.oldest_weight()
    return do.out
