"""Presets of :class:`MeshStrategy`: they name sizes and add nothing."""

from __future__ import annotations

from collections.abc import Sequence

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.strategies.mesh_strategy import MeshStrategy
from lit_pretrain.strategies.pipeline import PipelinedStrategy
from lit_pretrain.strategies.precision import GivenPrecision
from lit_pretrain.strategies.processes import Launcher


class ZeROStrategy(MeshStrategy):
    """Data parallelism over all devices, with optimizer states, gradients and parameters sharded by stage.

    Args:
        stage: 0 replicates everything (plain data parallelism); 1 shards optimizer states; 2 also gradients; 3 also
            parameters, gathered unit by unit.
        replicate_size: Hybrid sharding: so many groups of ranks hold the same shards, such as one per node.
        plan: How the module can be split; see :class:`MeshStrategy`.
        precision: ``bf16``, ``fp16`` or ``fp32``; see :class:`MeshStrategy`.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: Another stage, or sizes that do not fit the ranks.

    Example::

        Trainer(devices=8, strategy=ZeROStrategy(3), gradient_clip_val=1.0).fit(module)
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        replicate_size: int = 1,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        if stage == 0 and replicate_size != 1:
            raise ConfigError(
                f"strategy.replicate_size={replicate_size} shards nothing at strategy.stage=0; leave it out."
            )
        sizes: dict[str, int | None] = (
            {"dp_replicate": None} if stage == 0 else {"dp_replicate": replicate_size, "dp_shard": None}
        )
        super().__init__(
            sizes=sizes, stage=stage, plan=plan, precision=precision, launcher=launcher, timeout_s=timeout_s
        )


class TensorParallelStrategy(MeshStrategy):
    """Every matrix split over the devices of a tensor-parallel group; what devices remain share the data.

    Args:
        tensor_parallel_size: Ranks of a group, best within one machine; None for all devices.
        sequence_parallel: Split activations between layers along the sequence; None: where the plan allows it.
        plan: How the module can be split; see :class:`MeshStrategy`.
        precision: ``bf16``, ``fp16`` or ``fp32``; see :class:`MeshStrategy`.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: Sizes that do not fit the ranks or the model, listing those that do.
    """

    def __init__(
        self,
        tensor_parallel_size: int | None = None,
        *,
        sequence_parallel: bool | None = None,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        sizes: dict[str, int | None] = {"tp": tensor_parallel_size}
        if tensor_parallel_size is not None:
            sizes["dp_shard"] = None
        super().__init__(
            sizes=sizes,
            stage=1,
            sequence_parallel=sequence_parallel,
            plan=plan,
            precision=precision,
            launcher=launcher,
            timeout_s=timeout_s,
        )


class ContextParallelStrategy(MeshStrategy):
    """Every sequence split over the devices of a group, by ring attention; what devices remain share the data.

    For sequences whose activations one device cannot hold. Each rank takes an early and a late piece of each sequence,
    so that causal attention is the same work for all. The ranks also shard the model as ``stage`` says.

    The module's batches are mappings with ``ids`` and, of the same shape, ``targets`` (already shifted), ``positions``
    and ``doc_ids``; its steps hand ``batch["positions"]`` to the model, which takes the place of a token from nothing
    else. What a step logs or predicts is of a rank's own part.

    Args:
        context_parallel_size: Ranks that share a sequence, whose length is a multiple of twice as many; None for all
            devices.
        stage: Of ZeRO, over all devices; see :class:`ZeROStrategy`.
        plan: Names the attention layers; see :class:`MeshStrategy`. Our GPT has one of its own.
        precision: ``bf16``, ``fp16`` or ``fp32``; see :class:`MeshStrategy`.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: Sizes that do not fit the ranks or the sequences, listing those that do; a model that offers no
            place for ring attention, or drops attention weights out.
    """

    def __init__(
        self,
        context_parallel_size: int | None = None,
        *,
        stage: int = 1,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        sizes: dict[str, int | None] = {"cp": context_parallel_size}
        if context_parallel_size is not None:
            sizes["dp_replicate" if stage == 0 else "dp_shard"] = None
        super().__init__(
            sizes=sizes, stage=stage, plan=plan, precision=precision, launcher=launcher, timeout_s=timeout_s
        )


class PipelineParallelStrategy(PipelinedStrategy):
    """The layers of a model spread over the devices of a pipeline; what devices remain share the data.

    Args:
        pipeline_parallel_size: Ranks of a pipeline; None for all devices.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``zero_bubble``, ``zbv``, ``dualpipev``.
        num_microbatches: Parts that each batch is cut into; None for four times the pipeline's ranks.
        stages_per_rank: For the interleaved schedules, ``looped_bfs`` and ``zero_bubble``; None for their default.
        layers_per_stage: Your own cut; None balances layers, embedding and head by their weights.
        stage: Of ZeRO, over the devices that remain.
        plan: How the module can be cut: ``embed``, ``blocks`` and ``head``; see :class:`MeshStrategy`.
        precision: ``bf16``, ``fp16`` or ``fp32``; see :class:`MeshStrategy`.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: Settings that do not fit the ranks, the model or the batch, listing those that do.

    Example::

        Trainer(devices=4, strategy=PipelineParallelStrategy(schedule="zbv", num_microbatches=8)).fit(module)
    """

    def __init__(
        self,
        pipeline_parallel_size: int | None = None,
        *,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        stage: int = 1,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        sizes: dict[str, int | None] = {"pp": pipeline_parallel_size}
        if pipeline_parallel_size is not None:
            sizes["dp_replicate" if stage == 0 else "dp_shard"] = None
        super().__init__(
            sizes=sizes,
            stage=stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            layers_per_stage=layers_per_stage,
            plan=plan,
            precision=precision,
            launcher=launcher,
            timeout_s=timeout_s,
        )


class HybridParallelStrategy(PipelinedStrategy):
    """Any of them together on one mesh: ZeRO's data parallelism, times pipeline, context and tensor parallelism.

    Args:
        tensor_parallel_size: Ranks that share each matrix.
        pipeline_parallel_size: Ranks that the layers are spread over; see :class:`PipelineParallelStrategy`.
        context_parallel_size: Ranks that share each sequence; see :class:`ContextParallelStrategy`.
        replicate_size: Groups of ranks that hold the same shards.
        shard_size: Ranks over which parameters, gradients or optimizer states are sharded; None for what the other
            sizes leave.
        stage: Of ZeRO; see :class:`ZeROStrategy`.
        schedule: Of the pipeline.
        num_microbatches: Parts that the pipeline cuts each batch into; None for four times its ranks.
        stages_per_rank: Of the pipeline; None for the schedule's default.
        layers_per_stage: Your own cut of the pipeline; None balances layers, embedding and head.
        sequence_parallel: Split activations between layers along the sequence; None: where the plan allows it.
        plan: How the module can be split; see :class:`MeshStrategy`.
        precision: ``bf16``, ``fp16`` or ``fp32``; see :class:`MeshStrategy`.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: Sizes that do not fit the ranks or the model, listing those that do.

    Example::

        HybridParallelStrategy(tensor_parallel_size=2, stage=3)  # on 8 devices: 4 shards x 2
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        replicate_size: int = 1,
        shard_size: int | None = None,
        stage: int = 1,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        sequence_parallel: bool | None = None,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        if stage == 0:
            if shard_size not in (None, 1):
                raise ConfigError(f"strategy.shard_size={shard_size} shards nothing at strategy.stage=0; leave it out.")
            sizes: dict[str, int | None] = {"dp_replicate": None if replicate_size == 1 else replicate_size}
        else:
            sizes = {"dp_replicate": replicate_size, "dp_shard": shard_size}
        super().__init__(
            sizes={
                **sizes,
                "pp": pipeline_parallel_size,
                "cp": context_parallel_size,
                "tp": tensor_parallel_size,
            },
            stage=stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            layers_per_stage=layers_per_stage,
            sequence_parallel=sequence_parallel,
            plan=plan,
            precision=precision,
            launcher=launcher,
            timeout_s=timeout_s,
        )
