"""Which stage has which layers and lives on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import check_microbatches, rank_of_stage, stages_of_rank, stages_per_rank, traits
from lit_pretrain.schedules.pipeline_layers import layer_range, split_layers
from lit_pretrain.specs import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """A schedule on a number of ranks, and the layers of each of its stages.

    Args:
        schedule: Its name.
        ranks: Pipeline ranks.
        num_microbatches: Parts that a training batch is cut into.
        counts: Layers of each stage, first to last.
    """

    schedule: str
    ranks: int
    num_microbatches: int
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: ParallelPlan,
        *,
        schedule: str,
        ranks: int,
        num_microbatches: int | None = None,
        wanted_stages_per_rank: int | None = None,
        cut: Sequence[int] | None = None,
    ) -> PipelineLayout:
        """The layout of a model; the work of its embedding and head is told from their weights.

        Args:
            model: Whole; may be on the meta device.
            plan: Its parts.
            schedule: Its name.
            ranks: Pipeline ranks.
            num_microbatches: None for four times the ranks, where the bubble is small.
            wanted_stages_per_rank: None for the schedule's default.
            cut: Layers of each stage; None for the rule of :func:`split_layers`.

        Raises:
            ConfigError: A setting is illegal.
        """
        per_rank = stages_per_rank(schedule, wanted_stages_per_rank)
        microbatches = 4 * ranks if num_microbatches is None else num_microbatches
        check_microbatches(schedule, microbatches, ranks=ranks, stages=per_rank)
        blocks = blocks_of(model, plan)
        if traits(schedule).splits_backward:
            _refuse_selective(blocks, schedule=schedule)
        embed_cost, head_cost = costs(model, plan)
        counts = split_layers(len(blocks), ranks * per_rank, embed_cost=embed_cost, head_cost=head_cost, cut=cut)
        return cls(schedule=schedule, ranks=ranks, num_microbatches=microbatches, counts=counts)

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return len(self.counts)

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.ranks

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart."""
        return traits(self.schedule).splits_backward

    @property
    def last_rank(self) -> int:
        """The pipeline rank with the last stage."""
        return rank_of_stage(self.schedule, self.num_stages - 1, ranks=self.ranks)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return stages_of_rank(self.schedule, rank, ranks=self.ranks, stages=self.stages_per_rank)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return layer_range(self.counts, stage)


def blocks_of(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The blocks that stages are cut from, by their name inside the container, in order.

    Raises:
        ConfigError: The plan names none, or a module that is not there.
    """
    if plan.blocks is None:
        raise ConfigError(
            f"The plan of {type(model).__name__} names no blocks, so it cannot be cut into pipeline stages; give the "
            "strategy a ParallelPlan with blocks=NAME of the container of its layers."
        )
    for name in (plan.blocks, *plan.embed, *plan.head):
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ConfigError(
                f"The plan names {name!r}, but {type(model).__name__} has no such module; it has "
                f"{', '.join(n for n, _ in model.named_children())}."
            ) from None
    return dict(model.get_submodule(plan.blocks).named_children())


def _refuse_selective(blocks: dict[str, nn.Module], *, schedule: str) -> None:
    """What selective checkpointing keeps is gone after one backward pass, and the two halves are two (torch 2.13)."""
    parts = (part for block in blocks.values() for part in block.modules())
    if any(getattr(part, "activation_checkpointing", None) == "selective" for part in parts):
        raise ConfigError(
            f"strategy.schedule={schedule} computes input and weight gradients apart, which "
            "activation_checkpointing=selective does not allow; use full or none, or schedule=1f1b, "
            "interleaved_1f1b, gpipe or looped_bfs."
        )


def costs(model: nn.Module, plan: ParallelPlan) -> tuple[float, float]:
    """Work of embedding and head, in blocks: weights that are multiplied, against those of the average block.

    Rows of an embedding are looked up, not multiplied; as a head (tied) they are multiplied.
    """
    blocks = blocks_of(model, plan).values()
    block = sum(_matrices(b) for b in blocks) / max(1, len(blocks))
    embed = sum(_matrices(model.get_submodule(n), looked_up=True) for n in plan.embed)
    head = sum(_matrices(model.get_submodule(n)) for n in plan.head)
    return (embed / block, head / block) if block else (0.0, 0.0)


def _matrices(module: nn.Module, *, looked_up: bool = False) -> int:
    return sum(
        parameter.numel()
        for part in module.modules()
        if not (looked_up and isinstance(part, nn.Embedding))
        for parameter in part.parameters(recurse=False)
        if parameter.ndim >= 2
    )
