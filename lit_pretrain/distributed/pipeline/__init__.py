"""A model cut into stages over ranks, and the schedules that run it, on torch.distributed.pipelining."""

from lit_pretrain.distributed.pipeline.calls import Call, rows_of, split
from lit_pretrain.distributed.pipeline.engine import Pipeline
from lit_pretrain.distributed.pipeline.layout import PipelineLayout
from lit_pretrain.distributed.pipeline.parts import PipelineParts
from lit_pretrain.distributed.pipeline.stand_ins import Absent

__all__ = ["Absent", "Call", "Pipeline", "PipelineLayout", "PipelineParts", "rows_of", "split"]
