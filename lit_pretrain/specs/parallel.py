"""How ranks are arranged and how a model may be split over them, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lit_pretrain.errors import ConfigError

Axis = Literal["dp_replicate", "dp_shard", "pp", "cp", "tp"]

SETTINGS: Mapping[Axis, str] = {
    "dp_replicate": "strategy.replicate_size",
    "dp_shard": "strategy.shard_size",
    "pp": "strategy.pipeline_parallel_size",
    "cp": "strategy.context_parallel_size",
    "tp": "strategy.tensor_parallel_size",
}
"""What a user calls each axis, outermost first."""

TensorStyle = Literal[
    "column",
    "column_gather",
    "row",
    "vocabulary",
    "vocabulary_head",
    "ids",
    "tied_head",
    "positions",
    "enter",
    "norm",
    "final_norm",
    "head_norm",
]


def divisors(number: int) -> list[int]:
    """The whole numbers that divide ``number``, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(values: list[int]) -> str:
    """``1, 2 or 4``."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the mesh axes, outermost first. Their product is the number of ranks.

    Args:
        dp_replicate: Groups of ranks that hold the same shards and read different data.
        dp_shard: Ranks over which parameters, gradients or optimizer states are sharded; they read different data.
        pp: Pipeline stages' ranks.
        cp: Ranks that share each sequence.
        tp: Ranks that share each matrix.

    Raises:
        ConfigError: A size is no whole number of at least 1.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, setting in SETTINGS.items():
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{setting}={size!r} must be a whole number of at least 1.")

    @property
    def sizes(self) -> dict[Axis, int]:
        """Size of every axis, outermost first."""
        return {axis: getattr(self, axis) for axis in SETTINGS}

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different rows of a global batch."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def fit(cls, world_size: int, **sizes: int | None) -> ParallelDims:
        """The arrangement of ``world_size`` ranks; at most one size may be None and takes what the others leave.

        Args:
            world_size: Ranks in all.
            sizes: Axis to size; an axis left out has size 1.

        Raises:
            ConfigError: The sizes do not fit; the message lists those that would.
        """
        free = [axis for axis, size in sizes.items() if size is None]
        assert len(free) <= 1, free
        given = {axis: size for axis, size in sizes.items() if size is not None}
        dims = cls(**given)
        if free and world_size % dims.world_size == 0:
            return cls(**{**given, free[0]: world_size // dims.world_size})
        if dims.world_size == world_size:
            return dims
        raise ConfigError(_misfit(dims, world_size, exact=not free))


def _misfit(dims: ParallelDims, world_size: int, *, exact: bool) -> str:
    ranks = f"{world_size} ranks (trainer.devices x trainer.num_nodes)"
    large = [axis for axis, size in dims.sizes.items() if size > 1]
    if not large:
        return f"The strategy is laid out for 1 rank, but there are {ranks}; set trainer.devices=1."
    if len(large) == 1:
        setting, size = SETTINGS[large[0]], dims.sizes[large[0]]
        rule, legal = ("equal", [world_size]) if exact else ("divide", divisors(world_size))
        return f"{setting}={size} must {rule} the {ranks}; use {listed(legal)}."
    product = " x ".join(f"{SETTINGS[axis]}={dims.sizes[axis]}" for axis in large)
    rule = "equal" if exact else "divide"
    product_is = str(world_size) if exact else listed(divisors(world_size))
    return f"{product} is {dims.world_size} and must {rule} the {ranks}; choose sizes whose product is {product_is}."


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model can be split, as data: it knows no strategy, and a strategy knows no model.

    Names are patterns of submodule names, with ``*`` for one whole part (``blocks.*.mlp``).

    Args:
        tensor_parallel: Pattern to style. ``column`` and ``row`` split a linear layer by output and by input features
            (``column_gather`` gives its whole output back); ``vocabulary`` splits an embedding by rows;
            ``vocabulary_head`` splits a weight by rows that the model itself uses, never calling the module;
            ``ids`` and ``tied_head`` are for a pipeline's later stages, where the embedding is absent or only the head;
            ``positions`` is a replicated embedding of positions; ``enter`` marks a module whose first argument feeds
            column layers; ``norm`` is a replicated norm over features, ``final_norm`` the last one, whose output is
            whole; ``head_norm`` is a replicated norm inside each head.
        divisible: Setting to value: what ``tensor_parallel_size`` must divide.
        sequence_parallel: Whether the styles also allow activations between layers to be split along the sequence.
        sharded_dropout: Modules whose dropout acts on split activations, so that its masks must differ between the
            ranks of a tensor-parallel group.
        attention: Causal attention layers whose product over the sequence may be replaced, so that ranks can share
            sequences: each has a method ``attend(q_BHTD, k_BGTD, v_BGTD, context)`` that gives (B, H, T, D), and
            ``context.doc_ids_BT`` where documents are isolated. Everything else in the model must treat each token by
            itself, and take its place from ``positions``.
        units: Modules that are sharded, gathered and freed as one; the rest is one more unit.
        embed: Modules of the first pipeline stage.
        blocks: The container whose children pipeline stages are cut from.
        head: Modules of the last pipeline stage, in the order in which they run; one that is in ``embed`` too is tied.
    """

    tensor_parallel: Mapping[str, TensorStyle] = field(default_factory=dict)
    divisible: Mapping[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    sharded_dropout: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    blocks: str | None = None
    head: tuple[str, ...] = ()
