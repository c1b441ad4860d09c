"""Pipeline schedules by name: where stages live, what is legal, how long ranks idle and what they hold; no torch.

p is the number of pipeline ranks, m of microbatches, v of stages on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lit_pretrain.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What sets a schedule apart.

    Args:
        title: As in its paper.
        stages_per_rank: The only legal v, or None where any is.
        default_stages_per_rank: v where the user names none.
        v_shaped: The last stage lives with the first one, as ``0 1 2 2 1 0`` fold into a V; else stages go round.
        splits_backward: Gradients of weights are computed apart from those of inputs.
        source: The paper.
    """

    title: str
    stages_per_rank: int | None
    default_stages_per_rank: int
    v_shaped: bool = False
    splits_backward: bool = False
    source: str


SCHEDULES: dict[str, Traits] = {
    "gpipe": Traits(title="GPipe", stages_per_rank=1, default_stages_per_rank=1, source="Huang et al. 2019"),
    "1f1b": Traits(title="1F1B", stages_per_rank=1, default_stages_per_rank=1, source="Narayanan et al. 2019"),
    "interleaved_1f1b": Traits(
        title="interleaved 1F1B",
        stages_per_rank=None,
        default_stages_per_rank=2,
        source="Narayanan et al. 2021, section 2.2",
    ),
    "looped_bfs": Traits(
        title="looped breadth-first",
        stages_per_rank=None,
        default_stages_per_rank=2,
        source="Lamy-Poirier 2023",
    ),
    "zero_bubble": Traits(
        title="interleaved zero bubble (ZB1P)",
        stages_per_rank=None,
        default_stages_per_rank=1,
        splits_backward=True,
        source="Qi et al. 2024, section 4",
    ),
    "zbv": Traits(
        title="ZBV",
        stages_per_rank=2,
        default_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        source="Qi et al. 2024, section 6",
    ),
    "dualpipev": Traits(
        title="DualPipeV",
        stages_per_rank=2,
        default_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        source="DeepSeek-AI 2024, section 3.2.1, folded into a V",
    ),
}


def traits(schedule: str) -> Traits:
    """The traits of a schedule.

    Raises:
        ConfigError: Unknown name.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"strategy.schedule={schedule!r} is unknown; use one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[schedule]


def stages_per_rank(schedule: str, wanted: int | None = None) -> int:
    """Stages on each rank.

    Args:
        schedule: Its name.
        wanted: The user's choice, or None for the schedule's default.

    Raises:
        ConfigError: The schedule cannot have that many.
    """
    own = traits(schedule)
    if wanted is None:
        return own.default_stages_per_rank
    legal = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
    if own.stages_per_rank is not None and wanted != own.stages_per_rank:
        raise ConfigError(
            f"strategy.stages_per_rank={wanted!r} does not fit strategy.schedule={schedule}, which has "
            f"{own.stages_per_rank}; use {own.stages_per_rank}, or schedule=interleaved_1f1b, looped_bfs or "
            "zero_bubble."
        )
    if not legal:
        raise ConfigError(f"strategy.stages_per_rank={wanted!r} must be a whole number of at least 1.")
    return wanted


def microbatch_rule(schedule: str, ranks: int, stages: int) -> tuple[Callable[[int], bool], str]:
    """Which numbers of microbatches a schedule takes, as a test and in words.

    Args:
        schedule: Its name.
        ranks: p.
        stages: v.
    """
    traits(schedule)
    if schedule == "1f1b":
        return (lambda m: m >= ranks), f"at least strategy.pipeline_parallel_size={ranks}"
    if schedule == "dualpipev":
        return (lambda m: m >= 2 * ranks), f"at least twice strategy.pipeline_parallel_size={ranks}"
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        # Microbatches go round in groups of about p; a shorter last group would leave the order undefined.
        return (lambda m: m % max(1, m // ranks) == 0), (
            f"such that its whole rounds of strategy.pipeline_parallel_size={ranks} divide it"
        )
    return (lambda m: True), "at least 1"


def legal_microbatches(schedule: str, *, ranks: int, stages: int, up_to: int) -> list[int]:
    """All legal numbers of microbatches up to a limit, ascending."""
    fits, _ = microbatch_rule(schedule, ranks, stages)
    return [m for m in range(1, up_to + 1) if fits(m)]


def check_microbatches(schedule: str, microbatches: int, *, ranks: int, stages: int, rows: int | None = None) -> None:
    """Refuse a number of microbatches that the schedule cannot run or the batch cannot be cut into.

    Args:
        schedule: Its name.
        microbatches: m.
        ranks: p.
        stages: v.
        rows: Sequences of a batch on each data-parallel rank, where known.

    Raises:
        ConfigError: Listing legal values.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigError(f"strategy.num_microbatches={microbatches!r} must be a whole number of at least 1.")
    fits, rule = microbatch_rule(schedule, ranks, stages)
    legal = legal_microbatches(schedule, ranks=ranks, stages=stages, up_to=max(4 * ranks, rows or 0))
    if rows is not None:
        legal = [m for m in legal if rows % m == 0]
    use = f"use {_listed(legal)}" if legal else f"use schedule=gpipe or a batch of at least {2 * ranks} rows"
    if not fits(microbatches):
        raise ConfigError(
            f"strategy.num_microbatches={microbatches} must be {rule} for strategy.schedule={schedule}; {use}."
        )
    if rows is not None and rows % microbatches:
        raise ConfigError(
            f"A batch of {rows} rows cannot be cut into strategy.num_microbatches={microbatches} equal parts; {use}, or"
            f" give batches whose rows are a multiple of {microbatches} (drop_last=True drops a shorter last one)."
        )


def _listed(values: list[int], *, most: int = 8) -> str:
    shown = [str(v) for v in values[:most]]
    if len(values) > most:
        return f"{', '.join(shown)}, ..."
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def rank_of_stage(schedule: str, stage: int, *, ranks: int) -> int:
    """The pipeline rank that runs a stage: round and round, or forth and back for a V."""
    if not traits(schedule).v_shaped:
        return stage % ranks
    return stage if stage < ranks else 2 * ranks - 1 - stage


def stages_of_rank(schedule: str, rank: int, *, ranks: int, stages: int) -> list[int]:
    """The stages that a pipeline rank runs, ascending; ``ranks x stages`` in all."""
    return [s for s in range(ranks * stages) if rank_of_stage(schedule, s, ranks=ranks) == rank]


def bubble_fraction(schedule: str, *, ranks: int, microbatches: int, stages: int = 1) -> Fraction | None:
    """Idle time over ideal time, where forward, input gradient and weight gradient take equally long.

    The share of wall time that is idle is ``r / (1 + r)``. Sending takes no time here.

    Args:
        schedule: Its name.
        ranks: p.
        microbatches: m.
        stages: v.

    Returns:
        ``(p-1)/m`` for GPipe and 1F1B, ``(p-1)/(v m)`` interleaved or looped, ``(p-1)/(3 v m)`` for zero bubble,
        ``(p-1)/(6 m)`` for the V schedules: a rank idles only until its first forward. (The papers call that zero, as
        a rank whose optimizer need not wait for the others could start its next step early by as much.) None where
        there are too few microbatches to fill the pipeline, and only a simulation tells.

    Source: Narayanan et al. 2021, section 2.2; Qi et al. 2024, sections 2, 4 and 6.
    """
    own = traits(schedule)
    enough = 2 * ranks - 1 if schedule == "zbv" else 1 if schedule == "gpipe" else ranks
    if microbatches < enough:
        return None
    if own.v_shaped:
        return Fraction(ranks - 1, 6 * microbatches)
    return Fraction(ranks - 1, microbatches * stages * (3 if own.splits_backward else 1))


def peak_in_flight(schedule: str, rank: int, *, ranks: int, microbatches: int, stages: int = 1) -> int:
    """Most forwards of one rank whose activations are held at once, each one microbatch on one of its v stages.

    Divide by v to compare with a schedule that has one stage on a rank. The V schedules are given for microbatches
    enough to fill the pipeline.

    Args:
        schedule: Its name.
        rank: Pipeline rank.
        ranks: p.
        microbatches: m.
        stages: v.

    Returns:
        ``v m`` where all forwards come first (GPipe, looped), ``min(m, p - rank)`` for 1F1B,
        ``min(v m, (v-1) g + 2 (p-1-rank) + 1)`` interleaved, with rounds of g microbatches (p where p divides m), and
        ``(v-1) g + p`` with a split backward, ``2p`` for ZBV, ``2p+1`` for DualPipeV.

    Source: Narayanan et al. 2021, section 2.2; Qi et al. 2024, table 1; DeepSeek-AI 2024, table 2.
    """
    total = stages * microbatches
    behind = ranks - 1 - rank
    in_round = microbatches // max(1, microbatches // ranks)
    if schedule in ("gpipe", "looped_bfs"):
        return total
    if schedule == "1f1b":
        return min(microbatches, behind + 1)
    if schedule == "interleaved_1f1b":
        return min(total, (stages - 1) * in_round + 2 * behind + 1)
    if schedule == "zero_bubble":
        return min(total, (stages - 1) * in_round + ranks)
    return min(total, 2 * ranks + (1 if schedule == "dualpipev" else 0))
