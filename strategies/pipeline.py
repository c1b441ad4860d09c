"""Pipeline parallelism for ordinary LightningModules, alone or with every other axis of the mesh."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_pretrain.distributed.grad_norm import global_norm
from lit_pretrain.distributed.layout import LayoutSettings, lay_out
from lit_pretrain.distributed.materialize import copy_from_rank_zero, is_on_meta
from lit_pretrain.distributed.pipeline import Pipeline, PipelineLayout, PipelineParts
from lit_pretrain.distributed.pipeline.engine import make_pair
from lit_pretrain.distributed.pipeline.roots import Gathering, pipelined_name, plan_of_view, root_of, within_model
from lit_pretrain.distributed.pipeline.whole import StageStates
from lit_pretrain.distributed.plans import find_plan
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import check_microbatches, traits
from lit_pretrain.specs import LazyParameters
from lit_pretrain.specs.parallel import SETTINGS
from lit_pretrain.strategies import _compat
from lit_pretrain.strategies.evaluation import EvaluationTurns
from lit_pretrain.strategies.mesh_strategy import MeshStrategy
from lit_pretrain.strategies.pipeline_steps import PipelinedSteps
from lit_pretrain.strategies.precision import policies


class PipelinedStrategy(MeshStrategy):
    """A mesh strategy whose ``pp`` axis may be larger than 1.

    The schedule runs forward and backward within ``training_step``; the gradients are kept aside until Lightning has
    called ``zero_grad`` and asks for the backward pass. All of Lightning's hooks keep their order.

    Args:
        sizes: Axis to size; see :class:`MeshStrategy`.
        stage: Of ZeRO.
        schedule: One of :data:`lit_pretrain.schedules.pipeline.SCHEDULES`.
        num_microbatches: Parts that each batch is cut into; None for four times the pipeline's ranks.
        stages_per_rank: None for the schedule's default.
        layers_per_stage: The user's own cut; None balances layers, embedding and head.
        settings: Of :class:`MeshStrategy`.

    Raises:
        ConfigError: A setting is out of range. What depends on ranks, model and batch is refused before any process
            starts.
    """

    def __init__(
        self,
        *,
        sizes: dict[str, int | None],
        stage: int,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(sizes=sizes, stage=stage, **settings)
        traits(schedule)
        self._schedule, self._num_microbatches = schedule, num_microbatches
        self._stages_per_rank, self._layers_per_stage = stages_per_rank, layers_per_stage
        self._steps: PipelinedSteps | None = None
        self._states: StageStates | None = None
        self._gathering: Gathering | None = None
        self._parked: list[tuple[nn.Parameter, Tensor]] = []

    # ---------------------------------------------------------------- set-up

    def _check_before_launch(self) -> None:
        module = self.lightning_module
        assert module is not None
        if self._steps is not None and self._laid_out is module:
            return  # pruned by now
        super()._check_before_launch()
        if self.dims.pp == 1:
            return
        kind = type(module).__name__
        if not module.automatic_optimization:
            raise ConfigError(
                f"{kind} optimizes by hand (automatic_optimization=False), but a pipeline runs forward and backward "
                "together; use automatic optimization, or another strategy."
            )
        if type(module).backward is not pl.LightningModule.backward:
            raise ConfigError(
                f"{kind} overrides backward, which a pipeline's schedule runs itself; remove it, or use another "
                "strategy."
            )
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "needs_whole_model", False):
                raise ConfigError(
                    f"{type(callback).__name__} calls the whole model, which {SETTINGS['pp']}={self.dims.pp} spreads "
                    "over stages; leave it out, and use it on a checkpoint."
                )
        layout = self._layout(module)
        rows = getattr(getattr(module.trainer, "datamodule", None), "micro_batch_size", None)
        if isinstance(rows, int):
            check_microbatches(
                layout.schedule,
                layout.num_microbatches,
                ranks=layout.ranks,
                stages=layout.stages_per_rank,
                rows=rows,
            )

    def _layout(self, module: pl.LightningModule) -> PipelineLayout:
        plan = find_plan(module, self._given_plan)
        name = pipelined_name(module, plan)
        return PipelineLayout.of(
            module.get_submodule(name),
            within_model(plan, name),
            schedule=self._schedule,
            ranks=self.dims.pp,
            num_microbatches=self._num_microbatches,
            wanted_stages_per_rank=self._stages_per_rank,
            cut=self._layers_per_stage,
        )

    def _lay_out(self, module: pl.LightningModule) -> None:
        if self.dims.pp == 1:
            super()._lay_out(module)
            return
        self.model = self.precision_plugin.convert_module(module)
        if not is_on_meta(module):
            copy_from_rank_zero(module, device=self.root_device)
        plan = find_plan(module, self._given_plan)
        self._share_sequences(module, plan)
        name, layout = pipelined_name(module, plan), self._layout(module)
        model = module.get_submodule(name)
        mesh = self.mesh.device_mesh
        group = mesh.get_group("pp")
        self._states = StageStates(module, group=group, keeps=self._keeps_parts)
        parts = PipelineParts(model, within_model(plan, name), layout, rank=mesh.get_local_rank("pp"))
        lazy = module if isinstance(module, LazyParameters) else None
        parts.roots = [root_of(view, name=name, lazy=lazy) for view in parts.views]
        settings = LayoutSettings(
            plan=plan,
            mesh=self.mesh,
            zero=self.zero,
            device=self.root_device,
            sequence_parallel=self._splits_sequence,
            seed=self.broadcast(torch.initial_seed()),
            **policies(self.precision_plugin),
        )
        for root, number in zip(parts.roots, parts.stages, strict=True):
            lay_out(root, replace(settings, plan=plan_of_view(plan, root, is_first=number == 0)))
        lines = mesh.mesh.movedim(list(self.dims.sizes).index("pp"), -1).reshape(-1, self.dims.pp).tolist()
        pipeline = Pipeline(
            parts,
            device=self.root_device,
            group=group,
            pair=make_pair(lines, last=layout.last_rank) if parts.tied else None,
            context=self.precision_plugin.forward_context,
        )
        self._steps = PipelinedSteps(module, name=name, parts=parts, pipeline=pipeline)
        self._gathering = Gathering(parts.roots, reshards=self.zero.stage == 3)
        model.forward = _refuse_call
        if self._gathers:
            self._turns = FixedTurns(
                self._gathering.modules,
                keeps_gathered=True,
                group=self.mesh.shard_group,
                device=self.root_device,
            )
        self._laid_out = module

    @property
    def _keeps_parts(self) -> bool:
        """Whether this rank speaks for its stage: the pipeline of rank 0 does."""
        return all(self.mesh.coordinate(axis) == 0 for axis in self.dims.sizes if axis != "pp")

    # ---------------------------------------------------------------- training

    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The whole pipeline, forward and backward; the gradients wait for :meth:`backward`."""
        if self._steps is None:
            return super().training_step(batch, *rest, **kwargs)
        module = self.lightning_module
        assert module is not None
        first = not self._compared_batches
        if first:
            self._compare_batches(batch)
            self._compared_batches = True
        parameters = list(module.parameters())
        every = module.trainer.accumulate_grad_batches
        # Lightning calls zero_grad after this step where a window begins, before it asks for the backward pass.
        begins = module.trainer.fit_loop.epoch_loop.batch_idx % every == 0
        if begins:
            for parameter in parameters:
                parameter.grad = None
        shared = self._shared(batch, step="training_step" if first else None)
        with self.precision_plugin.train_step_context(), shared as part:
            # The backward passes run here: what the precision plugin does to the loss later would come too late.
            divisor = every / getattr(self.precision_plugin, "loss_scale", 1.0)
            loss = self._steps.train("training_step", part, *rest, *kwargs.values(), divisor=divisor)
        parameters = list(module.parameters())  # gathered ones, inside a window
        self._parked = [(p, p.grad) for p in parameters if p.grad is not None] if begins else []
        for parameter, _ in self._parked:
            parameter.grad = None
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Give the parameters the gradients of the step; every hook around the backward pass runs."""
        if self._steps is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        for parameter, gradient in self._parked:
            parameter.grad = gradient
        self._parked = []
        if self._steps.pipeline.ends_window:
            self._steps.pipeline.ties.sum_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A batch inside an accumulation window."""
        if self._steps is None:
            with super().block_backward_sync():
                yield
            return
        pipeline = self._steps.pipeline
        pipeline.begin_batch(ends_window=False, reduces=self.zero.stage >= 2)
        try:
            yield
        finally:
            pipeline.begin_batch(ends_window=True, reduces=True)

    def global_grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """L2 norm over all ranks and stages; a weight that two stages share counts once. Every rank calls it."""
        if self._steps is None:
            return super().global_grad_norm(parameters)
        pipeline = self._steps.pipeline
        elsewhere = pipeline.ties.counted_elsewhere
        own = [p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere]
        return pipeline.total_norm(global_norm(own))

    # ---------------------------------------------------------------- evaluation

    def validation_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's validation step, over the pipeline."""
        return self._evaluate("validation_step", batch, *rest, **kwargs)

    def test_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's test step, over the pipeline."""
        return self._evaluate("test_step", batch, *rest, **kwargs)

    def predict_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """The module's predict step, over the pipeline; every rank gets what it returns."""
        return self._evaluate("predict_step", batch, *rest, **kwargs)

    def _evaluate(self, step: str, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return getattr(super(), step)(batch, *rest, **kwargs)
        assert self._gathering is not None
        run = self._steps.predict if step == "predict_step" else self._steps.evaluate
        turn = self._turns.step() if self._turns is not None else nullcontext()
        # Not under inference mode: it would spoil the sharded parameters for the training steps that follow.
        with turn, torch.inference_mode(False), torch.no_grad(), self._gathering.all(), self._shared(batch) as part:
            return run(step, part, *rest, *kwargs.values())

    # ---------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0, nothing elsewhere; or what each rank has, where they save together."""
        if self._states is None:
            return super().lightning_module_state_dict()
        return self._states.own_weights() if self._saves_together else self._states.weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole states on rank 0, nothing elsewhere; or what each rank has, where they save together."""
        if self._states is None:
            return super().optimizer_state(optimizer)
        plain = _compat.plain_optimizer(optimizer)
        return self._states.own_optimizer(plain) if self._saves_together else self._states.optimizer(plain)

    def optimizer_parameter_names(self) -> list[list[list[str]]] | None:
        """Names per group per optimizer over all stages; None where this rank's module has every parameter."""
        if self._states is None:
            return None
        return [self._states.names_of(optimizer) for optimizer in self.optimizers]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, saved under any layout."""
        if self._states is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._states.load_weights(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole states, saved under any layout."""
        if self._states is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._states.load_optimizer(optimizer, saved)


class FixedTurns(EvaluationTurns):
    """Turns of a pipeline: each step gathers everything once, whatever then runs."""

    def _note(self, module: Any, _args: Any) -> None:
        """Layers run once for each microbatch, after they were gathered: nothing to learn from it."""


def _refuse_call(*_args: Any, **_kwargs: Any) -> Any:
    raise ConfigError(
        "The model is spread over a pipeline and can be called only within training_step, validation_step, test_step "
        "and predict_step; for anything else (generating text, an example forward) use the checkpoint on one device."
    )
