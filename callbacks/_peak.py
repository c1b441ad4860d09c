"""What a device could do at most."""

from __future__ import annotations

import functools
import time

import torch

from lit_pretrain.planning import peak_flops

_BUDGET_S = 0.2
_SIZE = 768  # a matrix of 2.4 MB in float32: beyond the caches of level 1 and 2, a few ms a product


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device: published for GPUs (dense, 16-bit), measured for a CPU; None where unknown.

    Args:
        device: Where the model is.
        dtype: What a CPU is measured in.
    """
    if device.type == "cuda":
        return peak_flops(torch.cuda.get_device_name(device))
    return measured_matmul_flops(dtype, torch.get_num_threads()) if device.type == "cpu" else None


@functools.cache
def measured_matmul_flops(dtype: torch.dtype, num_threads: int) -> float:
    """The best of some matrix products in about 0.2 s, once per process, type and thread count.

    Args:
        dtype: Of the factors.
        num_threads: Only tells measurements apart.
    """
    generator = torch.Generator().manual_seed(0)
    factor = torch.rand(_SIZE, _SIZE, generator=generator).to(dtype)
    torch.mm(factor, factor)  # the first product sets up threads and buffers
    best, deadline = float("inf"), time.perf_counter() + _BUDGET_S
    while (start := time.perf_counter()) < deadline:
        torch.mm(factor, factor)
        best = min(best, time.perf_counter() - start)
    return 2.0 * _SIZE**3 / best
