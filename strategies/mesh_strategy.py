"""One Lightning strategy for every layout; the presets only name sizes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lit_pretrain.distributed import state
from lit_pretrain.distributed.collectives import equal_on_ranks, fingerprint
from lit_pretrain.distributed.context_parallel import SharedSequences, attention_layers
from lit_pretrain.distributed.grad_norm import clip_to_norm, global_norm
from lit_pretrain.distributed.layout import LayoutSettings, lay_out
from lit_pretrain.distributed.materialize import copy_from_rank_zero, is_on_meta
from lit_pretrain.distributed.plans import find_plan
from lit_pretrain.distributed.random_state import align_random_state
from lit_pretrain.distributed.sequence_order import check_sequence_length
from lit_pretrain.distributed.sharding import Zero, make_entry_point
from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.layouts import check_tensor_parallel
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.strategies import _compat
from lit_pretrain.strategies.evaluation import EvaluationTurns
from lit_pretrain.strategies.precision import GivenPrecision, adapt, given, policies
from lit_pretrain.strategies.processes import Launcher, MeshProcesses

GROUPS = {"tp": "tensor-parallel group", "pp": "pipeline", "cp": "context-parallel group"}
"""Axes along which ranks read the same batch, and what such ranks are called."""
ENTRY_POINTS = ("training_step", "validation_step", "test_step", "predict_step", "generate")


class MeshStrategy(MeshProcesses):
    """Trains an ordinary LightningModule on a mesh of ranks: sharded data, context and tensor parallelism.

    The module needs no change. How it can be split is found in this order: ``plan``; a ``parallel_plan`` attribute of
    the module or of a part of it; a Hugging Face model's own plan; else each repeated layer is a unit of sharding.

    Args:
        sizes: Axis to size; None for one that takes what the others leave.
        stage: Of ZeRO; see :class:`lit_pretrain.distributed.sharding.Zero`.
        sequence_parallel: Split activations between layers along the sequence; None: where the plan allows it.
        plan: How the module can be split, names relative to the LightningModule.
        precision: ``bf16``, ``fp16``, ``fp32`` or a :class:`lit_pretrain.plugins.MasterWeightPrecision`; None: as the
            trainer's flag says.
        launcher: ``script``, ``spawn`` or ``fork``.
        timeout_s: How long a rank waits for another, in seconds.

    Raises:
        ConfigError: A setting is out of range. What depends on the ranks and the model is refused before any process
            starts, or, where something else starts them, before they find each other.
    """

    casts_weights = True  # precision plugins: sharding gathers in 16 bits
    materializes = True  # a module on the meta device may stay there: setup gives it memory, shard by shard

    def __init__(
        self,
        *,
        sizes: dict[str, int | None],
        stage: int,
        sequence_parallel: bool | None = None,
        plan: ParallelPlan | None = None,
        precision: GivenPrecision = None,
        launcher: Launcher = "script",
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(sizes=sizes, launcher=launcher, timeout_s=timeout_s)
        self.zero = Zero(stage=stage)
        self._given_precision = given(precision)
        self._given_plan, self._sequence_parallel = plan, sequence_parallel
        self._laid_out: nn.Module | None = None
        self._turns: EvaluationTurns | None = None
        self._sequences: SharedSequences | None = None
        self._compared_batches = False
        self._saves_together = False
        self._plan_splits_sequence = False

    # ---------------------------------------------------------------- precision and gradients

    @property
    def precision_plugin(self) -> Precision:
        """As the trainer set it. It stays unset until then, or the trainer's flag would be ignored without a word."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            plugin = adapt(plugin, own=self._given_precision)
            plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]
        self._precision_plugin = plugin

    def global_grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """L2 norm over all ranks of the gradients of ``parameters``, 0-d. Every rank calls it."""
        return global_norm([p.grad for p in parameters if p.grad is not None])

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        clip_to_norm(parameters, clip_val, self.global_grad_norm(parameters))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        for parameter in self.precision_plugin.main_params(optimizer):
            if parameter.grad is not None:
                state.local(parameter.grad).clamp_(-clip_val, clip_val)

    # ---------------------------------------------------------------- set-up

    def _check_before_launch(self) -> None:
        module, dims = self.lightning_module, self.dims
        assert module is not None
        plan = find_plan(module, self._given_plan)
        self._plan_splits_sequence = plan.sequence_parallel
        if dims.tp > 1:
            if not plan.tensor_parallel:
                raise ConfigError(
                    f"strategy.tensor_parallel_size={dims.tp} needs a plan of how {type(module).__name__} splits its "
                    "layers, and it has none; give the strategy a plan (lit_pretrain.specs.ParallelPlan), or use ZeRO."
                )
            check_tensor_parallel(dims.tp, plan.divisible, world_size=dims.world_size)
        if dims.cp > 1:
            attention_layers(module, plan, size=dims.cp)
            length = getattr(getattr(module.trainer, "datamodule", None), "sequence_length", None)
            if isinstance(length, int):
                check_sequence_length(length, size=dims.cp)
        if self._sequence_parallel and not plan.sequence_parallel:
            raise ConfigError(
                f"strategy.sequence_parallel=true, but the plan of {type(module).__name__} does not "
                "allow it; use false."
            )

    def setup(self, trainer: pl.Trainer) -> None:
        """Lay the module out, then make optimizers over what this rank holds."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._check_before_launch()
        if self._laid_out is not module:
            self._lay_out(module)
            self._save_together()
        _compat.leave_inference_mode(trainer)
        _compat.before_results_of_loader(trainer, self._finish_loader)
        self.model_to_device()
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            self._compared_batches = False
            align_random_state(self.mesh, sequence_parallel=self._splits_sequence)
            _compat.forget_optimizers(self)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fit:
            _compat.move_optimizers(self.optimizers, self.root_device)

    def _lay_out(self, module: pl.LightningModule) -> None:
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"This {type(module).__name__} is already sharded by another strategy; make a new one, and load a "
                "checkpoint into it."
            )
        self.model = self.precision_plugin.convert_module(module)
        if not is_on_meta(module):
            copy_from_rank_zero(module, device=self.root_device)
        plan = find_plan(module, self._given_plan)
        self._share_sequences(module, plan)
        settings = LayoutSettings(
            plan=plan,
            mesh=self.mesh,
            zero=self.zero,
            device=self.root_device,
            sequence_parallel=self._splits_sequence,
            seed=self.broadcast(torch.initial_seed()),
            **policies(self.precision_plugin),
        )
        lay_out(module, settings)
        for name in ENTRY_POINTS:
            if hasattr(module, name):
                make_entry_point(module, name)
        if self._gathers:
            self._turns = EvaluationTurns(
                module,
                keeps_gathered=self.zero.stage < 3,
                group=self.mesh.shard_group,
                device=self.root_device,
            )
        self._laid_out = module

    def _share_sequences(self, module: nn.Module, plan: ParallelPlan) -> None:
        if self.dims.cp > 1:
            layers = attention_layers(module, plan, size=self.dims.cp)
            self._sequences = SharedSequences(
                layers, group=self.mesh.device_mesh.get_group("cp"), owner=type(module).__name__
            )

    @property
    def _gathers(self) -> bool:
        """Whether ranks that may have other numbers of batches gather parameters together."""
        return self.zero.stage > 0 and self.dims.dp_shard > 1

    @property
    def _splits_sequence(self) -> bool:
        assert self.lightning_module is not None
        wanted = self._plan_splits_sequence if self._sequence_parallel is None else self._sequence_parallel
        return wanted and self.dims.tp > 1

    def model_to_device(self) -> None:
        """Move what is not sharded: buffers, metrics."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Where ``Trainer.init_module`` and ``configure_model`` make tensors; on the meta device when empty ones do."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # ---------------------------------------------------------------- steps

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A backward pass inside an accumulation window: reduce only what would not fit otherwise."""
        assert self._laid_out is not None
        self.zero.set_accumulating(self._laid_out, accumulating=True)
        try:
            yield
        finally:
            self.zero.set_accumulating(self._laid_out, accumulating=False)

    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's training step; the first batch is compared between ranks that must read the same one."""
        first = not self._compared_batches
        if first:
            self._compare_batches(batch)
            self._compared_batches = True
        with self._shared(batch, step="training_step" if first else None) as part:
            return super().training_step(part, *rest, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward pass of the step."""
        with self._sequences.active() if self._sequences is not None else nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    def _shared(self, batch: Any, *, step: str | None = None) -> Iterator[Any]:
        """What this rank takes of a batch: all, or its part of each sequence.

        Args:
            batch: The data-parallel rank's.
            step: Which step to check for reading positions; None for none.
        """
        if self._sequences is None:
            yield batch
            return
        part = self._sequences.part(batch)
        with self._sequences.active():
            yield part
        if step is not None:
            part.check(f"{self._sequences.owner}.{step}")

    def _compare_batches(self, batch: Any) -> None:
        axes = [axis for axis in GROUPS if getattr(self.dims, axis) > 1]
        if not axes:
            return
        mark = fingerprint(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        for axis in axes:
            alike = equal_on_ranks(mark, group=self.mesh.device_mesh.get_group(axis), device=self.root_device)
            if not self.reduce_boolean_decision(alike):
                raise ConfigError(
                    f"Ranks of one {GROUPS[axis]} read different batches; let the loader follow "
                    "trainer.strategy.distributed_sampler_kwargs (rank and num_replicas), not the process's rank."
                )

    def validation_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's validation step."""
        with self._evaluating(batch) as part:
            return super().validation_step(part, *rest, **kwargs)

    def test_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's test step."""
        with self._evaluating(batch) as part:
            return super().test_step(part, *rest, **kwargs)

    def predict_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's predict step."""
        with self._evaluating(batch) as part:
            return super().predict_step(part, *rest, **kwargs)

    @contextmanager
    def _evaluating(self, batch: Any) -> Iterator[Any]:
        turn = self._turns.step() if self._turns is not None else nullcontext()
        with turn, self._shared(batch) as part:
            yield part

    def on_validation_start(self) -> None:
        """Agree on the number of steps."""
        self._begin_evaluation()

    def on_test_start(self) -> None:
        """Agree on the number of steps."""
        self._begin_evaluation()

    def on_predict_start(self) -> None:
        """Agree on the number of steps."""
        self._begin_evaluation()

    def on_predict_end(self) -> None:
        """Stay until no rank has batches."""
        self._finish_loader()

    def _begin_evaluation(self) -> None:
        assert self.lightning_module is not None
        if self._turns is not None:
            self._turns.begin(_compat.evaluation_batches(self.lightning_module.trainer))

    def _finish_loader(self) -> None:
        if self._turns is not None:
            self._turns.finish_loader()

    # ---------------------------------------------------------------- checkpoints

    def _save_together(self) -> None:
        """Let a plugin that can do so save each rank's part: nobody then holds, or waits for, the whole model."""
        together = getattr(self.checkpoint_io, "save_together", None)
        if together is not None and not self._saves_together and self.dims.world_size > 1:
            together(dist.new_group(backend="gloo"))
            self._saves_together = True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save; every rank calls it, and rank 0 or all of them write."""
        if self._saves_together:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into their shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0, nothing elsewhere; or what each rank has, where they save together."""
        assert self.lightning_module is not None
        if self._saves_together:
            return self.lightning_module.state_dict()
        return state.whole_state_dict(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole states on rank 0, nothing elsewhere; or what each rank has, where they save together."""
        if self._saves_together:
            return _compat.plain_optimizer(optimizer).state_dict()
        return state.whole_optimizer_state(_compat.plain_optimizer(optimizer), keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, saved under any layout."""
        assert self.lightning_module is not None
        state.load_whole_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole states, saved under any layout."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            state.load_whole_optimizer_state(optimizer, saved)

    def teardown(self) -> None:
        """Leave the weights where they are: they are shards."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
