"""How large gradients, weights and updates are, layer by layer, and how noisy gradients are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._measuring.tokens import data_parallel_size
from lit_pretrain.callbacks.order import Order
from lit_pretrain.checks import flag, number, whole
from lit_pretrain.distributed.grad_norm import global_norm


class GradientStatistics(Callback):
    """Figures of every ``every_n_steps``-th update; other updates cost nothing, and nobody waits in them.

    - ``grads/norm/GROUP``: L2 norm of the gradients of a group of layers, before clipping, over all shards
    - ``grads/update_ratio/GROUP``: norm of the change that the optimizer made over the norm of the weights. About 1e-3
      is healthy; it needs a copy of the weights for the length of that update
    - ``grads/noise_scale``: the simple noise scale, in sequences: below it larger batches train in proportionally fewer
      updates, above it they waste data. It compares the first microbatch's gradient with the whole update's, averaged
      over the measured updates, so it needs accumulation; where gradients are kept elsewhere until an update's end
      (ZeRO 0 and 1) it is left out

    A group is a part of the name up to the first number (``model.blocks.3``), or the module's first two names.

    Args:
        every_n_steps: Updates between two measurements.
        update_ratio: Measure the updates, too.
        smoothing: Share of the newest measurement in the averages behind the noise scale.

    Source: McCandlish et al. 2018 (An empirical model of large-batch training), appendix A.1.
    """

    order: ClassVar[int] = Order.NON_FINITE - 1  # before gradients are clipped

    def __init__(self, *, every_n_steps: int = 100, update_ratio: bool = True, smoothing: float = 0.1) -> None:
        whole("statistics.every_n_steps", every_n_steps, least=1)
        flag("statistics.update_ratio", update_ratio)
        number("statistics.smoothing", smoothing, above=0.0, most=1.0)
        self.every_n_steps = every_n_steps
        self.update_ratio = update_ratio
        self.smoothing = smoothing
        self._groups: dict[str, list[nn.Parameter]] = {}
        self._names: list[str] = []  # of all ranks: a pipeline's stages hold different layers
        self._before: dict[str, list[Tensor]] = {}
        self._figures: dict[str, Tensor] = {}
        self._small: Tensor | None = None  # squared norm of the first microbatch's gradient
        self._rows = 0  # sequences of a microbatch on this rank
        self._noise: tuple[float, float] | None = None  # averages: squared true gradient, trace of its covariance
        self._hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Group the parameters as the optimizer knows them."""
        names = {id(p): name for name, p in pl_module.named_parameters()}
        self._groups = {}
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    self._groups.setdefault(group_of(names.get(id(p), "other")), []).append(p)
        self._names = _union(list(self._groups), trainer)
        self._hooks = [
            o.register_step_post_hook(self._measure_update) for o in trainer.optimizers if isinstance(o, Optimizer)
        ]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the size of the first microbatch's gradient."""
        if not self._is_due(trainer) or trainer.accumulate_grad_batches < 2 or self._small is not None:
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if gradients and _compat.accumulates(trainer):
            # Each microbatch's gradient comes divided by their number.
            self._small = (global_norm(gradients) * trainer.accumulate_grad_batches).square()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note how many sequences a microbatch has."""
        values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
        self._rows = next((len(v) for v in values if isinstance(v, Tensor) and v.ndim > 0), 0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure gradients, and keep the weights until the optimizer has run."""
        if not self._is_due(trainer):
            return
        whole = torch.zeros(())
        for name in self._names:
            gradients = [p.grad for p in self._groups.get(name, []) if p.grad is not None]
            norm = global_norm(gradients)
            self._figures[f"grads/norm/{name}"] = norm
            whole = whole.to(norm.device) + norm.square()
            if self.update_ratio:
                self._before[name] = [p.detach().clone() for p in self._groups.get(name, [])]
        self._add_noise(trainer, whole)

    @torch.no_grad()
    def _measure_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, {}
        for name, kept in before.items():
            change = [p.detach() - old for p, old in zip(self._groups.get(name, []), kept, strict=True)]
            self._figures[f"grads/update_ratio/{name}"] = global_norm(change) / global_norm(kept).clamp(min=1e-30)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hand over what was measured: the one moment at which the host waits for the device."""
        if not self._figures:
            return
        figures = _merged({name: float(value) for name, value in self._figures.items()}, self._names, trainer)
        if self._noise is not None and self._noise[0] > 0.0:
            figures["grads/noise_scale"] = max(0.0, self._noise[1]) / self._noise[0]
        self._figures, self._small = {}, None
        _compat.log(trainer, {name: value for name, value in figures.items() if math.isfinite(value)})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizers alone."""
        self._unhook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the optimizers alone."""
        self._unhook()

    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return {"noise": None if self._noise is None else list(self._noise)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on averaging."""
        noise = state_dict["noise"]
        self._noise = None if noise is None else (float(noise[0]), float(noise[1]))

    def _is_due(self, trainer: Trainer) -> bool:
        return (trainer.global_step + 1) % self.every_n_steps == 0

    def _add_noise(self, trainer: Trainer, whole: Tensor) -> None:
        """The two-batch estimate: ``E|g_B|^2 = |G|^2 + tr(S) / B`` at two sizes B."""
        if self._small is None or not self._rows or len(self._names) > len(self._groups):  # stages of a pipeline
            return
        ranks = data_parallel_size(trainer)
        sharded = any(isinstance(p.grad, DTensor) for group in self._groups.values() for p in group)
        small_rows = self._rows * (ranks if sharded else 1)
        large_rows = self._rows * ranks * trainer.accumulate_grad_batches
        small, large = float(self._small), float(whole)
        if ranks > 1 and not sharded:  # each rank's own microbatch: average what they saw
            small = float(trainer.strategy.reduce(torch.tensor(small), reduce_op="mean"))
        gradient, covariance = noise(small, large, small_rows=small_rows, large_rows=large_rows)
        if not (math.isfinite(gradient) and math.isfinite(covariance)):
            return
        if self._noise is None:
            self._noise = gradient, covariance
            return
        weight = self.smoothing
        self._noise = (
            (1 - weight) * self._noise[0] + weight * gradient,
            (1 - weight) * self._noise[1] + weight * covariance,
        )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def noise(small: float, large: float, *, small_rows: int, large_rows: int) -> tuple[float, float]:
    """Unbiased estimates of ``|G|^2`` and of the trace of one sequence's gradient covariance.

    Args:
        small: Squared norm of the mean gradient of ``small_rows`` sequences.
        large: Of ``large_rows``; more than ``small_rows``.
        small_rows: Sequences.
        large_rows: Sequences.
    """
    gradient = (large_rows * large - small_rows * small) / (large_rows - small_rows)
    covariance = (small - large) / (1.0 / small_rows - 1.0 / large_rows)
    return gradient, covariance


def group_of(name: str) -> str:
    """The group of layers that a parameter belongs to."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:2]) if len(parts) > 2 else parts[0]


def _union(names: list[str], trainer: Trainer) -> list[str]:
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return names
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, names)
    return list(dict.fromkeys(name for theirs in everyone for name in theirs))


def _merged(figures: dict[str, float], names: list[str], trainer: Trainer) -> dict[str, float]:
    """Every group's figure, from a rank that holds the group."""
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return figures
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, figures)
    out: dict[str, float] = {}
    for theirs in everyone:
        for name, value in theirs.items():
            out[name] = max(out.get(name, 0.0), value)
    return out
