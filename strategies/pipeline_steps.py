"""Steps of an ordinary LightningModule under a pipeline, which runs forward and backward together.

The step is called once with a model that only notes what it is called with; the schedule runs the stages; on the last
one the step is called again for each microbatch, with a model that gives the pipeline's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lit_pretrain.distributed.pipeline import Call, Pipeline, PipelineParts, rows_of, split
from lit_pretrain.distributed.pipeline.views import shallow
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import check_microbatches
from lit_pretrain.specs import StepSums
from lit_pretrain.strategies.pipeline_logs import Captured, LoggedValues


class Probe(BaseException):
    """Carries out what the model was called with. Not an Exception: a step may catch those."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class PipelinedSteps:
    """Runs a module's steps over a pipeline.

    Every rank of the pipeline calls everything, with the same batch.

    Args:
        module: Ordinary.
        name: Of its pipelined model.
        parts: This rank's stages of that model.
        pipeline: Runs them.
    """

    def __init__(self, module: pl.LightningModule, *, name: str, parts: PipelineParts, pipeline: Pipeline) -> None:
        self.module, self.name, self.parts, self.pipeline = module, name, parts, pipeline
        self.logs = LoggedValues(module, pipeline)
        self._watched: set[str] = set()
        # Copies of what the module sees as its model: to note a call, and to answer it.
        self._noting = shallow(parts.model)
        self._answering = shallow(parts.views[-1])

    def train(self, step: str, batch: Any, *rest: Any, divisor: float) -> Tensor:
        """Forward and backward of a batch; the mean loss over its microbatches, on every rank.

        Args:
            step: Name of the module's method.
            batch: Its first argument.
            rest: Its others.
            divisor: Of the loss, besides the number of microbatches: batches that make an update.

        Raises:
            ConfigError: The step does what a pipeline cannot honour; on every rank, before any weight changes.
        """
        layout = self.parts.layout
        parts, rows = layout.num_microbatches, self._rows(batch)
        check_microbatches(layout.schedule, parts, ranks=layout.ranks, stages=layout.stages_per_rank, rows=rows)
        captured = self._run(step, batch, rest, rows=rows, parts=parts, train=True, divisor=divisor * parts)
        loss = self.logs.share(captured, step=step, parts=parts)
        assert loss is not None
        if isinstance(self.module, StepSums):
            self.logs.share_sums(self.module, parts=parts)
        return loss

    def evaluate(self, step: str, batch: Any, *rest: Any) -> Any:
        """Forward of a batch; the mean of what the step returns where that is one number, else None."""
        rows = self._rows(batch)
        parts = self._evaluation_parts(rows)
        captured = self._run(step, batch, rest, rows=rows, parts=parts, train=False)
        return self.logs.share(captured, step=step, parts=parts)

    def predict(self, step: str, batch: Any, *rest: Any) -> Any:
        """Forward of a batch; what the step returns, rows put together again, on every rank."""
        rows = self._rows(batch)
        parts = self._evaluation_parts(rows)
        results: list[Any] = [None] * parts
        captured = self._run(step, batch, rest, rows=rows, parts=parts, train=False, keep=results.__setitem__)
        self.logs.share(captured, step=step, parts=parts)
        box = [_joined(results) if self.parts.has_last else None]
        dist.broadcast_object_list(box, src=self.logs.source, group=self.pipeline.group, device=torch.device("cpu"))
        return tree_map(lambda v: v.to(self.pipeline.device) if isinstance(v, Tensor) else v, box[0])

    # ---------------------------------------------------------------- one step

    def _run(
        self,
        step: str,
        batch: Any,
        rest: tuple[Any, ...],
        *,
        rows: int,
        parts: int,
        train: bool,
        divisor: float = 1.0,
        keep: Callable[[int, Any], None] | None = None,
    ) -> Captured:
        call = self._noted(step, batch, rest)
        microbatches = split(batch, parts, rows=rows)
        captured = Captured()

        def loss(output: Any, i: int) -> Tensor:
            try:
                result = self._answered(step, output, microbatches[i], rest, captured)
                if keep is not None:
                    keep(i, result)
                own = captured.take(result, train=train)
            except Exception as error:  # raised by every rank, once no rank waits for another
                captured.error = captured.error or error
                own = None
            if own is None:
                return _zero_of(output)
            return own / divisor

        key = _shapes(batch)
        if train:
            self.pipeline.train(call, loss, key=key)
        else:
            self.pipeline.evaluate(call, loss, microbatches=parts, key=key)
        return captured

    def _noted(self, step: str, batch: Any, rest: tuple[Any, ...]) -> Call:
        """What the step calls its model with. Runs the step up to there."""

        def note(*args: Any, **kwargs: Any) -> Any:
            raise Probe(Call(args, kwargs))

        self._noting.forward = note
        watch = step not in self._watched
        before = _plain_values(self.module) if watch else {}
        random = torch.get_rng_state()
        call = None
        with self._as_model(self._noting), Captured().listening(self.module):
            try:
                getattr(self.module, step)(batch, *rest)
            except Probe as probe:
                call = probe.call
        kind = type(self.module).__name__
        if call is None:
            raise ConfigError(
                f"{kind}.{step} never called self.{self.name}, which runs as a pipeline; a step has to call it once."
            )
        if not torch.equal(random, torch.get_rng_state()):
            raise ConfigError(
                f"{kind}.{step} draws random numbers before it calls self.{self.name}; under a pipeline each "
                "microbatch would draw others than the batch: draw in the data loader or inside the model."
            )
        if watch:
            changed = [k for k, v in _plain_values(self.module).items() if k not in before or before[k] != v]
            if changed:
                raise ConfigError(
                    f"{kind}.{step} changes self.{changed[0]} before it calls self.{self.name}; under a pipeline a "
                    "step runs once for each microbatch: change it in on_train_batch_end."
                )
            self._watched.add(step)
        return call

    def _answered(self, step: str, output: Any, batch: Any, rest: tuple[Any, ...], captured: Captured) -> Any:
        """The step on one microbatch, its model giving the pipeline's output."""
        calls = 0

        def answer(*_args: Any, **_kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigError(
                    f"{type(self.module).__name__}.{step} calls self.{self.name} more than once; it runs as a "
                    "pipeline, which can be called once in a step."
                )
            return output

        self._answering.forward = answer
        random = torch.get_rng_state()
        with self._as_model(self._answering), captured.listening(self.module):
            result = getattr(self.module, step)(batch, *rest)
        if not torch.equal(random, torch.get_rng_state()):
            raise ConfigError(
                f"{type(self.module).__name__}.{step} draws random numbers after it calls self.{self.name}; under a "
                "pipeline each microbatch would draw others than the batch: draw inside the model."
            )
        return result

    @contextmanager
    def _as_model(self, model: nn.Module) -> Iterator[None]:
        own = self.module._modules[self.name]
        assert own is not None
        model.training = own.training
        self.module._modules[self.name] = model
        try:
            yield
        finally:
            self.module._modules[self.name] = own

    # ---------------------------------------------------------------- microbatches

    @staticmethod
    def _rows(batch: Any) -> int:
        rows = rows_of(batch)
        if rows is None:
            raise ConfigError("A batch without a tensor cannot be cut into the microbatches of a pipeline.")
        return rows

    def _evaluation_parts(self, rows: int) -> int:
        """The most microbatches, up to those of training, that share the rows."""
        return next(m for m in range(min(rows, self.parts.layout.num_microbatches), 0, -1) if rows % m == 0)


def _zero_of(output: Any) -> Tensor:
    """A loss that changes nothing, for a microbatch whose own failed: the schedule has to go on to its end."""
    tensors: list[Tensor] = []
    tree_map(lambda v: tensors.append(v) if isinstance(v, Tensor) and v.is_floating_point() else None, output)
    return torch.stack([t.sum() * 0.0 for t in tensors]).sum()


def _shapes(value: Any) -> Any:
    """A key that differs where the shapes in a batch differ."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((str(k), _shapes(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_shapes(v) for v in value)
    return type(value).__name__


def _plain_values(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str) and k[0] != "_"}


def _joined(results: list[Any]) -> Any:
    """Outputs of the microbatches as one, on the CPU: rows of tensors and items of lists one after the other."""
    first = results[0]
    if isinstance(first, Tensor):
        plain = [r.detach().cpu() for r in results]
        return torch.cat(plain) if first.ndim else torch.stack(plain)
    if isinstance(first, Mapping):
        return {k: _joined([r[k] for r in results]) for k in first}
    if isinstance(first, tuple):
        return tuple(_joined([r[i] for r in results]) for i in range(len(first)))
    if isinstance(first, list):
        return [item for r in results for item in r]
    return first
