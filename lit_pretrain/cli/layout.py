"""How a configuration arranges its ranks, and whether model and batch fit: no torch, before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.layouts import (
    check_batch,
    check_pipeline,
    check_sequence,
    check_tensor_parallel,
    tensor_parallel_limits,
)
from lit_pretrain.schedules.pipeline import check_microbatches, stages_per_rank
from lit_pretrain.specs import GPTConfig, ParallelDims
from lit_pretrain.specs.parallel import SETTINGS

PACKAGE = "lit_pretrain.strategies"
OWN_AXIS = {"TensorParallelStrategy": "tp", "PipelineParallelStrategy": "pp", "ContextParallelStrategy": "cp"}
"""Presets whose one axis takes all ranks where its size is left out."""
KEYS = {axis: setting.partition(".")[2] for axis, setting in SETTINGS.items()}


def parallel_dims(strategy: object, world_size: int) -> ParallelDims | None:
    """Sizes of a strategy's axes; None for strategies of others, where every rank reads data of its own.

    Args:
        strategy: Its node, or its name.
        world_size: Ranks in all.

    Raises:
        ConfigError: They do not fit the ranks; listing what would.
    """
    if isinstance(strategy, str):
        name = next((name for name, axis in OWN_AXIS.items() if axis == strategy), None)
        strategy = {} if name is None else {"_target_": f"{PACKAGE}.{name}"}
    if not isinstance(strategy, Mapping):
        return None
    package, _, name = str(strategy.get("_target_", "")).rpartition(".")
    if package.partition(".presets")[0] != PACKAGE:
        return None
    sizes: dict[str, Any] = {axis: strategy[key] for axis, key in KEYS.items() if key in strategy}
    if name in OWN_AXIS:
        sizes.setdefault(OWN_AXIS[name], None)
    if strategy.get("stage") == 0:
        sizes.pop("dp_shard", None)
        if sizes.get("dp_replicate", 1) == 1:
            sizes["dp_replicate"] = None if None not in sizes.values() else 1
    elif None not in sizes.values():
        sizes.setdefault("dp_shard", None)
    free = [SETTINGS[axis] for axis in KEYS if axis in sizes and sizes[axis] is None]
    if len(free) > 1:
        raise ConfigError(f"{free[0]} and {free[1]} are both null, but only one can take what the others leave.")
    return ParallelDims.fit(world_size, **sizes)


def data_parallel_size(strategy: object, world_size: int) -> int:
    """Ranks that read different rows of a global batch."""
    dims = parallel_dims(strategy, world_size)
    return world_size if dims is None else dims.data_parallel_size


def check_layout(
    strategy: object, *, world_size: int, model: object, batch: Mapping[str, Any], callbacks: Mapping[str, Any]
) -> None:
    """Refuse a layout that model, sequence or batch cannot follow.

    Args:
        strategy: Its node, or its name.
        world_size: Ranks in all.
        model: The architecture; others than ours are checked by the strategy itself.
        batch: The group of that name.
        callbacks: By name.

    Raises:
        ConfigError: With the setting, the value, the rule and what is legal.
    """
    dims = parallel_dims(strategy, world_size)
    if dims is None:
        return
    settings: Mapping[str, Any] = strategy if isinstance(strategy, Mapping) else {}
    schedule = str(settings.get("schedule", "1f1b"))
    stages, microbatches = 1, None
    if dims.pp > 1:
        stages = stages_per_rank(schedule, settings.get("stages_per_rank"))
        microbatches = settings.get("num_microbatches") or 4 * dims.pp
    if isinstance(model, GPTConfig):
        check_tensor_parallel(dims.tp, tensor_parallel_limits(model), world_size=world_size)
        check_pipeline(dims.pp, num_layers=model.n_layer, stages_per_rank=stages)
        if dims.cp > 1 and model.dropout > 0:
            raise ConfigError(
                f"model.dropout={model.dropout} needs whole rows of attention weights, and {SETTINGS['cp']}={dims.cp} "
                f"splits them; set model.dropout=0 or {SETTINGS['cp']}=1."
            )
    check_sequence(batch["sequence_length"], dims)
    check_batch(dims, global_batch_size=batch["global_batch_size"], micro_batch_size=batch["micro_batch_size"])
    if microbatches is None:
        return
    check_microbatches(schedule, microbatches, ranks=dims.pp, stages=stages, rows=batch["micro_batch_size"])
    for key, node in callbacks.items():
        if isinstance(node, Mapping) and str(node.get("_target_", "")).endswith(".TextSampler"):
            raise ConfigError(
                f"callbacks.{key} writes text with the whole model, which {SETTINGS['pp']}={dims.pp} spreads over "
                f"stages; drop it with ~callbacks.{key}, and write text from a checkpoint with lit-pretrain generate."
            )
