"""Which sizes of a layout are legal for a model and a batch: pure arithmetic, before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import GPTConfig, ParallelDims
from lit_pretrain.specs.parallel import SETTINGS, divisors, listed


def tensor_parallel_limits(config: GPTConfig) -> dict[str, int]:
    """What ``tensor_parallel_size`` must divide: whole heads and whole hidden features on every rank.

    The vocabulary is not among them: its last shard may be shorter.
    """
    limits = {"model.n_head": config.n_head}
    if config.num_kv_heads != config.n_head:
        limits["model.n_kv_head"] = config.num_kv_heads
    return {**limits, "model.ffn_hidden_size": config.ffn_size}


def legal_sizes(limits: Mapping[str, int], *, world_size: int | None = None) -> list[int]:
    """Sizes that divide every limit, and the ranks where their number is known; ascending.

    Args:
        limits: Setting to value.
        world_size: Ranks in all.
    """
    return divisors(gcd(*limits.values(), *([] if world_size is None else [world_size])))


def check_tensor_parallel(size: int, limits: Mapping[str, int], *, world_size: int | None = None) -> None:
    """Refuse a tensor-parallel size that would cut a head or a feature.

    Args:
        size: ``tensor_parallel_size``.
        limits: From :func:`tensor_parallel_limits`, or a plan's ``divisible``.
        world_size: Ranks in all, to list only sizes that fit them.

    Raises:
        ConfigError: Listing the legal sizes.
    """
    broken = {name: value for name, value in limits.items() if value % size}
    if broken:
        name, value = next(iter(broken.items()))
        legal = listed(legal_sizes(limits, world_size=world_size))
        raise ConfigError(f"{SETTINGS['tp']}={size} must divide {name}={value}; use {legal}.")


def check_pipeline(size: int, *, num_layers: int, stages_per_rank: int = 1) -> None:
    """Refuse more stages than layers.

    Args:
        size: ``pipeline_parallel_size``.
        num_layers: Blocks of the model.
        stages_per_rank: Stages that the schedule puts on each rank.

    Raises:
        ConfigError: Listing the legal range.
    """
    if size > 1 and size * stages_per_rank > num_layers:
        most = num_layers // stages_per_rank
        use = f"1 to {most}" if most > 1 else "1"
        each = f" with {stages_per_rank} stages on each rank" if stages_per_rank > 1 else ""
        raise ConfigError(
            f"{SETTINGS['pp']}={size}{each} needs {size * stages_per_rank} layers, but model.n_layer={num_layers}; use "
            f"{use}, or more layers."
        )


def check_sequence(length: int, dims: ParallelDims) -> None:
    """Refuse a sequence that context-parallel ranks cannot share.

    Each rank takes one early and one late chunk, so that causal attention is the same work for all.

    Args:
        length: Tokens in a sequence.
        dims: The layout.

    Raises:
        ConfigError: Listing the legal sizes.
    """
    if dims.cp > 1 and length % (2 * dims.cp):
        legal = [size for size in divisors(length) if size == 1 or length % (2 * size) == 0]
        raise ConfigError(
            f"{SETTINGS['cp']}={dims.cp} needs batch.sequence_length={length} to be a multiple of {2 * dims.cp}; use "
            f"{listed(legal)}, or another length."
        )


def check_batch(
    dims: ParallelDims, *, global_batch_size: int, micro_batch_size: int, num_microbatches: int | None = None
) -> None:
    """Refuse batch sizes that the data-parallel ranks or the pipeline cannot share.

    Args:
        dims: The layout.
        global_batch_size: Sequences per update.
        micro_batch_size: Sequences per forward pass on each data-parallel rank.
        num_microbatches: Pieces a pipeline cuts each forward pass into; None without a pipeline.

    Raises:
        ConfigError: With the multiple that is legal.
    """
    rows = micro_batch_size * dims.data_parallel_size
    if global_batch_size % rows:
        raise ConfigError(
            f"batch.global_batch_size={global_batch_size} must be a multiple of batch.micro_batch_size="
            f"{micro_batch_size} x {dims.data_parallel_size} data-parallel ranks; use a multiple of {rows}."
        )
    if num_microbatches is None or dims.pp == 1:
        return
    if num_microbatches < dims.pp:
        raise ConfigError(
            f"strategy.num_microbatches={num_microbatches} must be at least {SETTINGS['pp']}={dims.pp}, or some stages "
            f"would always be idle; use {dims.pp} or more."
        )
    if micro_batch_size % num_microbatches:
        legal = [d for d in divisors(micro_batch_size) if d >= dims.pp]
        use = f"use {listed(legal)}, or " if legal else "use "
        raise ConfigError(
            f"strategy.num_microbatches={num_microbatches} must divide batch.micro_batch_size={micro_batch_size}; "
            f"{use}a multiple of {num_microbatches} for the batch."
        )
