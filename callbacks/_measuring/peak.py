"""What a device could do at most."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from lit_pretrain.planning import peak_flops

_BURST_S = 0.05
_FIRST_BURSTS = 3
_MORE_BURSTS = 4  # when training was faster than what was measured
# Edges of the square factors. On a busy machine a product is rarely left alone for more than a few ms, and large ones
# run at the full rate: one is as short as is sensible, another as fast.
_SIZES = (256, 512, 768)


class MatmulPeak:
    """The fastest rate seen of matrix products, measured in short bursts; it only ever rises.

    Other work on the machine makes every measurement too low, never too high. So the best single product counts, not a
    mean, and whoever reaches a higher rate has it measured again.

    Args:
        products: Each does one product; they take turns.
        flops: Of each product.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        products: Sequence[Callable[[], object]],
        flops: Sequence[float],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._turns = list(zip(products, flops, strict=True))
        self._clock = clock
        self._warned = False
        self.flops_per_s = 0.0
        for product in products:
            product()  # the first one sets up threads and buffers
        for _ in range(_FIRST_BURSTS):
            self._burst()

    def challenge(self, flops_per_s: float) -> float:
        """The peak, given that training ran at ``flops_per_s``; takes up to 0.2 s if that beats it, else nothing.

        What is still beaten after that is raised to what was reached, with one warning if that is far above: a share of
        the peak is never more than 1.
        """
        for _ in range(_MORE_BURSTS):
            if flops_per_s <= self.flops_per_s:
                return self.flops_per_s
            self._burst()
        if flops_per_s > 1.1 * self.flops_per_s and not self._warned:
            self._warned = True
            warnings.warn(
                f"Training runs at {flops_per_s / 1e9:.3g} GFLOP/s, matrix products alone at "
                f"{self.flops_per_s / 1e9:.3g}: flops_per_token is too large, or other work takes the CPU. perf/mfu is "
                "relative to the higher of the two; set callbacks.throughput.peak_flops to be sure.",
                stacklevel=2,
            )
        self.flops_per_s = max(self.flops_per_s, flops_per_s)
        return self.flops_per_s

    def _burst(self) -> None:
        end = self._clock() + _BURST_S
        while True:
            for product, flops in self._turns:
                start = self._clock()
                product()
                now = self._clock()
                if now > start:  # a coarse clock may stand still
                    self.flops_per_s = max(self.flops_per_s, flops / (now - start))
                if now >= end:
                    return


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | MatmulPeak | None:
    """Peak FLOP/s of one device: published for GPUs (dense, 16-bit), measured for a CPU; None where unknown.

    Args:
        device: Where the model is.
        dtype: What a CPU is measured in.
    """
    if device.type == "cuda":
        return peak_flops(torch.cuda.get_device_name(device))
    return matmul_peak(dtype, torch.get_num_threads()) if device.type == "cpu" else None


@functools.cache
def matmul_peak(dtype: torch.dtype, num_threads: int) -> MatmulPeak:
    """Measured in about 0.2 s at first, once per process, type and thread count.

    Args:
        dtype: Of the factors.
        num_threads: Only tells measurements apart.
    """
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(size, size, generator=generator).to(dtype) for size in _SIZES]
    products = [functools.partial(torch.mm, factor, factor) for factor in factors]
    return MatmulPeak(products, [2.0 * size**3 for size in _SIZES])
