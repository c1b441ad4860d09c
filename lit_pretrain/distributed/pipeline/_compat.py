"""Private parts of torch.distributed.pipelining (torch 2.13), and repairs that can go when torch has them."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from lit_pretrain.distributed.pipeline.stand_ins import Inbox

# Its warnings and the dump of a whole schedule on any error bury the error itself.
logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)


class DualPipeV(torch_schedules.ScheduleDualPipeV):
    """torch's, sending each result as soon as it is there.

    torch 2.13 runs the forward and the backward that are meant to overlap one after the other, and sends the forward's
    result after both: its neighbour waits for nothing.
    """

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], *args: Any, **kwargs: Any) -> None:
        flat = {
            rank: [one for action in order for one in (getattr(action, "sub_actions", None) or (action,))]
            for rank, order in actions.items()
        }
        super()._prepare_schedule_with_comms(flat, *args, **kwargs)


TRAINING: dict[str, type[Any]] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": DualPipeV,
}
# Forwards alone need no clever order; these take any number of microbatches, down to one.
EVALUATING: dict[str, type[Any]] = {
    **TRAINING,
    "1f1b": torch_schedules.ScheduleGPipe,
    "interleaved_1f1b": torch_schedules.ScheduleLoopedBFS,
    "zero_bubble": torch_schedules.ScheduleLoopedBFS,
    "dualpipev": torch_schedules.ScheduleZBVZeroBubble,
}


class Stage(PipelineStage):
    """torch's stage with what is missing in 2.13.

    - It says which microbatch it works on, so that the model's other arguments need not be sent along.
    - It gathers sharded parameters before each backward: split backwards look parameters up before FSDP's own hooks
      have gathered them, and gave wrong gradients without an error.
    - It reduces gradients at the end of an accumulation window only, and never in evaluation.

    Args:
        view: The stage's modules.
        index: Of the stage.
        num_stages: In all.
        inbox: Of the stage.
        device: Where it computes.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        view: nn.Module,
        *,
        index: int,
        num_stages: int,
        inbox: Inbox,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(view, index, num_stages, device, group=group)
        self.inbox = inbox
        self.reduces = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One microbatch's forward."""
        self.inbox.current = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """One microbatch's backward, whole or half."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        return super().backward_maybe_with_nosync(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last microbatch: let FSDP reduce what was accumulated."""
        assert grad_scale_factor == 1, "the schedule must not scale gradients: earlier microbatches are in them"
        if self.has_backward and self.reduces:
            super().perform_reduce_grad(1)

    def _post_metadata_inference_cleanup(self) -> None:
        """After shapes were exchanged: in evaluation nothing was differentiated, and what is gathered stays gathered.

        Ranks of other pipelines, which exchange no shapes in this step, would not take part in gathering it again.
        """
        if self.has_backward:
            super()._post_metadata_inference_cleanup()
        else:
            self._fwd_outputs_for_bwd_meta = self._fwd_inputs_for_bwd_meta = None
            self._fwd_kwargs_tensors_for_bwd_meta = None


def make_schedule(kind: type[Any], stages: list[Stage], microbatches: int, loss: Any) -> Any:
    """A schedule of torch over this rank's stages.

    ``scale_grads`` would divide gradients of earlier batches of an accumulation window again.
    """
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss, scale_grads=False)


def keep_forwards_only(schedule: Any) -> None:
    """Leave out of an evaluating schedule what has to do with backward or with gathering parameters.

    With backward in it, torch's V schedules assert in evaluation, where a rank hands gradients to its other stage.
    Whoever evaluates gathers beforehand, once: ranks of other pipelines, with other numbers of microbatches, take part.
    """
    if not isinstance(schedule, PipelineScheduleMulti):
        return
    kept = (torch_schedules.FORWARD, torch_schedules.SEND_F, torch_schedules.RECV_F)
    lowered = schedule.pipeline_order_with_comms  # type: ignore[attr-defined]
    for rank, actions in lowered.items():
        lowered[rank] = [action for action in actions if action.computation_type in kept]
    schedule.unsharded_stages = {stage.stage_index for stage in schedule._stages}  # type: ignore[attr-defined]


def exchange_shapes(schedule: Any, *, train: bool) -> None:
    """Let the stages tell each other the shapes of activations and gradients, as torch does within its first step.

    Done apart, since it clears the gradients of FSDP modules: whoever calls it keeps them safe. Every rank of the
    pipeline calls it.
    """
    stages = schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]
    own = schedule._has_backward
    schedule._has_backward = train
    for stage in stages:
        stage.has_backward = train
    initialize = (
        schedule._initialize_stages if isinstance(schedule, PipelineScheduleMulti) else schedule._initialize_stage
    )
    try:
        initialize((), {}, torch.zeros(1, dtype=torch.int64))
    finally:
        schedule._has_backward = own


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, in place or as a wrapper."""
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
