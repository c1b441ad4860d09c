"""Which share of each global batch this process reads."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl

from lit_pretrain.errors import ConfigError


@dataclass(frozen=True)
class Replica:
    """A place among the data-parallel ranks. Ranks of one tensor- or pipeline-parallel group share a place.

    Args:
        rank: From 0.
        size: Data-parallel ranks.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, trainer: pl.Trainer | None) -> Replica:
        """As the trainer's strategy says, else one place per process, else the only one."""
        if trainer is None:
            return cls()
        given = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
        if given is not None:
            return cls(int(given["rank"]), int(given["num_replicas"]))
        return cls(trainer.global_rank, trainer.world_size)

    def rows(self, micro: int, *, micro_batch_size: int) -> slice:
        """This place's rows of a global batch in its ``micro``-th microbatch."""
        low = (micro * self.size + self.rank) * micro_batch_size
        return slice(low, low + micro_batch_size)

    def check(self, trainer: pl.Trainer | None, *, micro_batch_size: int, global_batch_size: int) -> None:
        """Raises ConfigError unless the batch sizes fit the ranks and the trainer's accumulation."""
        rows = micro_batch_size * self.size
        if global_batch_size % rows:
            raise ConfigError(
                f"data.global_batch_size={global_batch_size} must be a multiple of data.micro_batch_size="
                f"{micro_batch_size} times {self.size} data-parallel ranks; use a multiple of {rows}."
            )
        needed = global_batch_size // rows
        if trainer is not None and trainer.accumulate_grad_batches != needed:
            raise ConfigError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be {needed}: "
                f"data.global_batch_size={global_batch_size} / (data.micro_batch_size={micro_batch_size} x {self.size} "
                "data-parallel ranks)."
            )
