"""How fast training runs, and how much of the hardware it uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._measuring.meter import StepMeter, pause_timing_of
from lit_pretrain.callbacks._measuring.peak import MatmulPeak, device_peak_flops
from lit_pretrain.callbacks._measuring.tokens import TokensPerBatch, check_tokens_per_batch, tokens_in
from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError


class ThroughputMonitor(Callback):
    """Logs speed, utilisation and memory of training, and of nothing else.

    Left out: sanity check, validation, saving, sampling by ``TextSampler``, and the first ``ignore_updates`` updates.
    Figures are means over the last ``window`` updates, written when the trainer logs:

    - ``perf/tokens_per_s``: over all ranks
    - ``perf/mfu``: model FLOP/s over the devices' peak (an exact share needs the right ``flops_per_token``)
    - ``perf/step_time_s``, ``perf/data_time_s``: per update, and the wait for data in it
    - ``perf/memory_gib``: peak of CUDA's allocator on this device, or the process's resident memory
    - ``perf/tokens``: tokens used by training since its start, over resumes

    Times are taken on the host and never wait for the device. A queue of at most a few steps stands between the two,
    so that a mean over a window is the device's pace; before validation and saving, which wait anyway, the queue is
    emptied and that wait is counted as training.

    Args:
        flops_per_token: Of forward and backward, or None to take the module's attribute ``flops_per_token``; without
            either there is no ``perf/mfu``.
        peak_flops: FLOP/s of one device; ``auto`` takes the published figure of a GPU and measures matrix products
            on a CPU, in the type that training multiplies in: the best of some bursts of 0.05 s before training, and
            again whenever training beats it, for other work on the machine makes a measurement too low. ``perf/mfu``
            against a measured peak is therefore never above 1. None turns ``perf/mfu`` off.
        tokens_per_batch: Tokens of one rank's batch, or a function of the batch; None asks the data module's
            ``tokens_per_update``. Without either there are times but no tokens.
        window: Updates to average over.
        ignore_updates: First updates of the process to leave out.
        clock: Seconds, monotonic.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | Literal["auto"] | None = "auto",
        tokens_per_batch: TokensPerBatch = None,
        window: int = 20,
        ignore_updates: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1:
            raise ConfigError(f"callbacks.throughput.window={window} must be at least 1.")
        if ignore_updates < 0:
            raise ConfigError(f"callbacks.throughput.ignore_updates={ignore_updates} must be at least 0.")
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and value != "auto" and not float(value) > 0:
                raise ConfigError(f"callbacks.throughput.{name}={value} must be above 0.")
        check_tokens_per_batch(tokens_per_batch, owner="throughput")
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.tokens_per_batch = tokens_per_batch
        self.window = window
        self.ignore_updates = ignore_updates
        self.clock = clock
        self.tokens = 0.0
        self._meter = self._new_meter()
        self._flops: float | None = None
        self._peak: float | MatmulPeak | None = None
        self._device = torch.device("cpu")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look up what the figures are measured against."""
        self._meter = self._new_meter()
        self._device = pl_module.device
        flops: Any = self.flops_per_token
        if flops is None:
            flops = getattr(pl_module, "flops_per_token", None)
        self._flops = float(flops() if callable(flops) else flops) if flops is not None else None
        self._peak = None
        if self._flops is not None and self.peak_flops is not None:
            self._peak = self._peak_of(trainer, pl_module) if self.peak_flops == "auto" else float(self.peak_flops)
            if self._peak is None:
                rank_zero_warn(
                    f"No peak FLOP/s is known for {self._device}; set callbacks.throughput.peak_flops for perf/mfu."
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The wait for data is over."""
        self._meter.batch_start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the step; write the figures when the trainer logs."""
        tokens = tokens_in(batch, trainer, self.tokens_per_batch)
        completes = not _compat.accumulates(trainer)
        self._meter.batch_end(tokens=tokens or 0.0, completes_update=completes)
        self.tokens += tokens or 0.0
        if completes and _compat.should_log(trainer):
            _compat.log(trainer, self._figures(trainer, knows_tokens=tokens is not None))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is not training."""
        self.pause_timing()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nor is saving; Lightning says when it starts, and the next batch says that it is over."""
        self.pause_timing()

    def pause_timing(self) -> None:
        """Do not count what happens until the next training batch."""
        drain = (lambda: torch.cuda.synchronize(self._device)) if self._device.type == "cuda" else None
        self._meter.pause(drain=drain)

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far; times are of this process only."""
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.tokens = state_dict["tokens"]

    def _new_meter(self) -> StepMeter:
        return StepMeter(window=self.window, ignore=self.ignore_updates, clock=self.clock)

    def _peak_of(self, trainer: Trainer, pl_module: LightningModule) -> float | MatmulPeak | None:
        kind = self._device.type
        with trainer.precision_plugin.forward_context():
            if torch.is_autocast_enabled(kind):
                return device_peak_flops(self._device, torch.get_autocast_dtype(kind))
        dtypes = (p.dtype for p in pl_module.parameters() if p.is_floating_point())
        return device_peak_flops(self._device, next(dtypes, torch.float32))

    def _utilisation(self, trainer: Trainer, flops_per_s: float) -> float | None:
        peak = self._peak
        if isinstance(peak, MatmulPeak):
            if flops_per_s > peak.flops_per_s:
                pause_timing_of(trainer.callbacks)  # type: ignore[attr-defined]
            peak = peak.challenge(flops_per_s)
        return None if peak is None else flops_per_s / peak

    def _figures(self, trainer: Trainer, *, knows_tokens: bool) -> dict[str, float]:
        figures = {"perf/memory_gib": memory_bytes(self._device) / 2**30}
        if knows_tokens:
            figures["perf/tokens"] = self.tokens
        seconds, data_seconds = self._meter.seconds_per_update, self._meter.data_seconds_per_update
        if seconds is not None and data_seconds is not None:
            figures |= {"perf/step_time_s": seconds, "perf/data_time_s": data_seconds}
        speed = self._meter.tokens_per_second
        if knows_tokens and speed is not None:
            figures["perf/tokens_per_s"] = speed
            share = None
            if self._flops is not None:
                share = self._utilisation(trainer, speed * self._flops / trainer.world_size)
            if share is not None:
                figures["perf/mfu"] = share
        return figures


def memory_bytes(device: torch.device) -> int:
    """Peak bytes of CUDA's allocator on a GPU; elsewhere the process's resident memory now (its peak on macOS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
