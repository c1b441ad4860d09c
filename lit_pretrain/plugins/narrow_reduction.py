"""Gradients of DistributedDataParallel reduced in 16 bits. torch's own hooks refuse bfloat16 outside of NCCL.

DistributedDataParallel compares the annotations of a hook, so they must not be strings: no ``annotations`` import here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

if TYPE_CHECKING:
    GradBucket = Any  # torch's stubs do not know it
else:
    GradBucket = dist.GradBucket

Hook = Callable[[object, GradBucket], Future[Tensor]]


def narrow_reduction(dtype: torch.dtype) -> Hook:
    """A communication hook that averages gradients over all ranks in a 16-bit type.

    Args:
        dtype: What is sent. The mean is taken before the sum, so that float16 overflows no sooner than one rank would.
    """

    def hook(_state: object, bucket: GradBucket) -> Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        sent = (buffer / dist.get_world_size()).to(dtype)

        def widen(future: Future[list[Tensor]]) -> Tensor:
            return buffer.copy_(future.value()[0])

        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        averaged: Future[Tensor] = work.get_future().then(widen)
        return averaged

    return hook
