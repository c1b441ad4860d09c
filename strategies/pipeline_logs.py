"""What a step logs and returns on the last stage, made known to every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lit_pretrain.distributed.pipeline import Pipeline
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import StepSums

COMBINED: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
"""How values of the microbatches become the batch's, by Lightning's ``reduce_fx``; else their mean."""


class Captured:
    """What one step logged and returned, microbatch after microbatch.

    Args:
        values: Name to the values logged.
        kinds: Name to the arguments of ``log``.
        metrics: Name to the metric object logged.
        losses: What the step returned, where that is one number.
        error: What a microbatch raised.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self.kinds: dict[str, dict[str, Any]] = {}
        self.metrics: dict[str, Metric] = {}
        self.losses: list[Tensor] = []
        self.error: Exception | None = None

    @contextmanager
    def listening(self, module: pl.LightningModule) -> Iterator[None]:
        """Catch what the module logs, instead of Lightning."""

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if args:  # prog_bar, logger, ... by position
                kwargs |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
            self._note(name, value, kwargs)

        def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, *args, **kwargs)

        own = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
        module.__dict__.update(log=log, log_dict=log_dict)
        try:
            yield
        finally:
            for name, function in own.items():
                del module.__dict__[name]
                if function is not None:
                    module.__dict__[name] = function

    def _note(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        before = self.kinds.get(name, {})
        if "batch_size" in kwargs and "batch_size" in before:
            kwargs["batch_size"] += before["batch_size"]
        self.kinds[name] = kwargs
        if isinstance(value, Metric):
            self.metrics[name] = value
            value = value._forward_cache if value._forward_cache is not None else torch.nan
        self.values.setdefault(name, []).append(torch.as_tensor(value).detach())

    def take(self, result: Any, *, train: bool) -> Tensor | None:
        """Note what a step returned; the loss to differentiate, or None where there is none.

        Raises:
            ConfigError: A training step returned no loss.
        """
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if isinstance(loss, Tensor) and loss.ndim == 0:
            self.losses.append(loss.detach())
            return loss
        if train:
            raise ConfigError(
                f"training_step returned {loss if loss is None else type(loss).__name__}; under a pipeline it has to "
                "return the loss, a 0-d tensor, for every batch."
            )
        return None


class LoggedValues:
    """Gives every rank what the last stage's rank has captured, and logs it there.

    Args:
        module: Whose ``log`` to call.
        pipeline: The ranks.
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline) -> None:
        self._module, self._pipeline = module, pipeline
        self.source = dist.get_global_rank(pipeline.group, pipeline.layout.last_rank)
        self._known: dict[str, Any] = {}  # what the last stage logs in each step, as last told

    def share(self, captured: Captured, *, step: str, parts: int) -> Tensor | None:
        """Log what was captured, averaged over the microbatches, on every rank; the mean of what was returned.

        Raises:
            ConfigError: The step failed on the last stage; every rank raises alike.
        """
        outline, values = self._outline(captured, parts=parts) if self._pipeline.parts.has_last else (None, None)
        # Words go by the CPU, so that nothing waits for a device, and only where they have changed.
        told: list[Any] = [None if outline == self._known.get(step) else outline]
        dist.broadcast_object_list(told, src=self.source, group=self._pipeline.group, device=torch.device("cpu"))
        if told[0] is not None:
            self._known[step] = told[0]
        names, error, loss_dtype = self._known[step]
        if error is not None:
            del self._known[step]
            if isinstance(captured.error, ConfigError):
                raise captured.error
            raise ConfigError(error) from captured.error  # where it happened, with its traceback
        numbers = self._broadcast(values, size=len(names) + 1)
        for (name, dtype, metric, kwargs), number in zip(names, numbers[1:].unbind(), strict=True):
            self._module.log(name, self._logged(metric, number.to(dtype)), **kwargs)
        return numbers[0].to(loss_dtype) if loss_dtype is not None else None

    def _outline(self, captured: Captured, *, parts: int) -> tuple[Any, Tensor]:
        if captured.error is not None:
            error = captured.error
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            return ([], text, None), torch.zeros(1, dtype=torch.float64)
        names = []
        numbers = [torch.stack(captured.losses).double().mean() if captured.losses else torch.tensor(torch.nan)]
        for name, values in captured.values.items():
            kwargs = captured.kinds[name]
            stacked = torch.stack([v.double() for v in values])
            combine = COMBINED.get(str(kwargs.get("reduce_fx", "mean")), torch.mean)
            numbers.append(combine(stacked))
            dtype = values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype()
            names.append((name, dtype, self._path(captured.metrics.get(name)), kwargs))
        device = self._pipeline.device
        return (names, None, captured.losses[0].dtype if captured.losses else None), torch.stack(
            [n.double().to(device) for n in numbers]
        )

    def _path(self, metric: Metric | None) -> str | None:
        if metric is None:
            return None
        for path, candidate in self._module.named_modules():
            if candidate is metric:
                return str(path)
        raise ConfigError("A logged metric object must be an attribute of the LightningModule.")

    def _logged(self, path: str | None, number: Tensor) -> Any:
        if path is None:
            return number
        metric = self._module.get_submodule(path)
        assert isinstance(metric, Metric)
        # Its state stays where it was filled, and is added up over all ranks at the end of the epoch.
        metric._update_count = max(1, metric._update_count)  # or it would warn, where the step ran elsewhere
        metric._forward_cache = number  # type: ignore[assignment]
        return metric

    def share_sums(self, module: StepSums, *, parts: int) -> None:
        """Give every rank the sums that the step added up on the last stage."""
        own = module.step_sums() if self._pipeline.parts.has_last else None
        module.set_step_sums(self._broadcast(own, size=module.num_step_sums), parts=parts)

    def _broadcast(self, values: Tensor | None, *, size: int) -> Tensor:
        numbers = torch.zeros(size, dtype=torch.float64, device=self._pipeline.device)
        if values is not None:
            numbers.copy_(values)
        dist.broadcast(numbers, src=self.source, group=self._pipeline.group)
        return numbers
