"""Who brought a value that is not finite into a run, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._compat import loops
from lit_pretrain.callbacks._lagging import LaggingMean
from lit_pretrain.callbacks.clipping import GradientClipping
from lit_pretrain.callbacks.order import Order
from lit_pretrain.checks import flag, whole
from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError


@dataclass
class _Update:
    number: int  # what Lightning counts, from 1
    names: list[str]
    norms: Tensor  # (parameters,), this rank's parts
    loss: Tensor | None
    batches: list[Any]
    layers: list[str]
    flags: Tensor | None  # (layers,), True where an output was not finite


class NonFiniteGuard(Callback):
    """Finds NaN and infinity in loss, gradients and (if asked) activations, and names rank, layer and batch.

    Every rank notes which of its gradients are not finite without waiting for the device; the ranks agree on it an
    update later (two on CUDA), and before anything is saved or validated. Then all of them tell what they saw: a loss
    that is not finite names the rank that has it, even where data parallelism has spread it over all; the parameter
    nearest the output with a finite loss, or the first layer whose output was not finite, names the place.

    ``stop`` raises on every rank; the bad update may have reached the weights in memory, never a file. ``report`` warns
    and goes on, for runs in which somebody else deals with it (``LossSpikeRollback``). Under a loss scaler (fp16)
    overflows are part of the game and the scaler's own: only a loss that is not finite is told of.

    It reads every gradient once per update; ``activations`` reads every output of every layer once.

    Args:
        action: ``stop`` or ``report``.
        activations: Look at what layers put out, too.
        max_reports: So many reports at most.

    Attributes:
        reports: What was told.

    Raises:
        ConfigError: When ``GradientClipping`` would decide the same, before the first step.
        FloatingPointError: Under ``stop``, on every rank.
    """

    order: ClassVar[int] = Order.NON_FINITE

    def __init__(
        self, *, action: Literal["stop", "report"] = "stop", activations: bool = False, max_reports: int = 10
    ) -> None:
        if action not in ("stop", "report"):
            raise ConfigError(f"non_finite.action={action!r} is unknown; use stop or report.")
        flag("non_finite.activations", activations)
        whole("non_finite.max_reports", max_reports, least=1)
        self.action = action
        self.activations = activations
        self.max_reports = max_reports
        self.reports: list[str] = []
        self._mean: LaggingMean | None = None
        self._kept: deque[_Update] = deque()  # those whose values are on their way
        self._hooks: list[RemovableHandle] = []
        self._layers: list[str] = []
        self._flags: dict[int, Tensor] = {}
        self._loss: Tensor | None = None
        self._batches: list[Any] = []  # read since the last update
        self._named: list[Any] = []  # of the last update
        self._was_bad = False  # the newest update that was looked at

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second owner."""
        if stage != "fit":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientClipping) and callback.non_finite != "ignore":
                raise ConfigError(
                    f"NonFiniteGuard(action={self.action!r}) and GradientClipping(non_finite={callback.non_finite!r}) "
                    "would both deal with gradients that are not finite; give it non_finite='ignore' "
                    "(callbacks.clipping.non_finite=ignore)."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the layers."""
        self._mean = LaggingMean(trainer)
        self._was_bad = False
        self._kept.clear()
        self._named = []
        self._forget_window()
        self._layers = []
        if self.activations:
            for name, layer in pl_module.named_modules():
                if name and not list(layer.children()):
                    self._hooks.append(layer.register_forward_hook(self._listener(len(self._layers))))
                    self._layers.append(name)

    def _listener(self, number: int) -> Any:
        def listen(layer: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and torch.is_grad_enabled():
                bad = ~state.local(output.detach()).isfinite().all()
                self._flags[number] = bad | self._flags[number] if number in self._flags else bad

        return listen

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember what the batch calls itself, its ``index``; without one, the count of batches read, from 0."""
        index = batch.get("index") if isinstance(batch, Mapping) else None
        self._batches.append(loops.batches_ready(trainer) - 1 if index is None else index)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss of this rank."""
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss + value

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note what is not finite; nobody waits."""
        assert self._mean is not None
        names = {id(p): name for name, p in pl_module.named_parameters()}
        found = [
            (names.get(id(p), "a parameter outside the module"), gradient)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (gradient := state.local(p.grad)).numel()  # a rank may hold nothing of it
        ]
        loss = self._loss
        bad = torch.zeros((), dtype=torch.float64, device=pl_module.device)
        norms = torch.zeros(0)
        if found:
            # A sum of squares may overflow where no value has; the largest magnitude cannot.
            norms = torch.stack([n.float() for n in torch._foreach_norm([g for _, g in found], float("inf"))])
            if _compat.grad_scaler(trainer) is None:
                bad = (~norms.isfinite()).sum().to(bad)
        if loss is not None:
            bad = bad + (~loss.isfinite()).to(bad)
        flags = [
            self._flags.get(i, torch.zeros((), dtype=torch.bool, device=bad.device)) for i in range(len(self._layers))
        ]
        number = trainer.global_step + 1
        self._named = self._batches or self._named  # another step on the same batches
        self._kept.append(
            _Update(
                number,
                [name for name, _ in found],
                norms,
                loss,
                self._named,
                self._layers,
                torch.stack(flags) if flags else None,
            )
        )
        self._forget_window()
        self._mean.send(number, bad.reshape(1))

    def _forget_window(self) -> None:
        self._flags, self._batches, self._loss = {}, [], None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where a window ends, look at what has arrived."""
        if self._mean is not None and not _compat.accumulates(trainer):
            self._look(trainer, self._arrived(self._mean.ready()))
            if pl_module.automatic_optimization:  # else the module may go on adding gradients
                self._forget_window()  # the optimizer has not run where no batch of it gave a loss

    def before_save(self, trainer: Trainer) -> None:
        """Look at everything; every rank calls it."""
        if self._mean is not None:
            self._look(trainer, self._arrived(self._mean.flush()))

    def went_back(self, trainer: Trainer) -> None:
        """The weights went back to an earlier update: what was not finite is told of once, and what it led to is not.

        Every rank calls it.
        """
        if self._mean is None:
            return
        bad = [one for one in self._arrived(self._mean.flush()) if one[1]]
        if not self._was_bad:
            self._look(trainer, bad[:1])
        self._was_bad = False
        self._forget_window()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No validation on weights that nobody has looked at."""
        if not trainer.sanity_checking:
            self.before_save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No success either."""
        self.before_save(trainer)
        self._unhook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the layers alone."""
        self._unhook()

    def _arrived(self, values: list[tuple[int, list[float]]]) -> list[tuple[_Update, bool]]:
        """The updates that values belong to, as this rank saw them, and whether any rank's was bad; oldest first."""
        return [(self._kept.popleft(), bad != 0) for _, (bad,) in values]

    def _look(self, trainer: Trainer, arrived: list[tuple[_Update, bool]]) -> None:
        for update, bad in arrived:
            self._was_bad = bad
            if not bad or len(self.reports) >= self.max_reports:
                continue
            message = _compose(update.number, _gather(_describe(update), trainer))
            self.reports.append(message)
            if self.action == "stop":
                self._unhook()
                raise FloatingPointError(message)
            rank_zero_warn(message)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _describe(update: _Update) -> dict[str, Any]:
    """What one rank saw, plain. Waits for the device: only when something has gone wrong."""
    bad = (~update.norms.isfinite()).nonzero().flatten().tolist()
    outputs = [] if update.flags is None else update.flags.nonzero().flatten().tolist()
    loss = None if update.loss is None else float(update.loss)
    return {
        "gradients": [update.names[i] for i in bad],
        "of": len(update.names),
        "outputs": [update.layers[i] for i in outputs],
        "loss": loss,
        "loss_is_finite": loss is None or abs(loss) < float("inf"),
        "batches": [int(i) for index in update.batches for i in torch.as_tensor(index).flatten().tolist()],
    }


def _compose(update: int, ranks: list[dict[str, Any]]) -> str:
    guilty = [r for r, seen in enumerate(ranks) if not seen["loss_is_finite"]]
    parts = []
    if guilty:
        losses = ", ".join(f"{ranks[r]['loss']} on rank {r}" for r in guilty)
        parts.append(f"the loss is {losses} (batches {ranks[guilty[0]]['batches']})")
    for rank, seen in enumerate(ranks):
        if seen["outputs"] and (not guilty or rank in guilty):
            parts.append(f"on rank {rank} the first layer to put it out is {seen['outputs'][0]}")
            break
    told = [r for r, seen in enumerate(ranks) if seen["gradients"] and (not guilty or r in guilty)]
    if told:
        seen = ranks[told[0]]
        where = f"{len(seen['gradients'])} of {seen['of']} gradients are not finite on rank {told[0]}"
        nearest = f", nearest the output that of {seen['gradients'][-1]}"
        parts.append(where + ("" if guilty else nearest))
    what = "; ".join(parts) or "a value is not finite"
    return f"Update {update}: {what}. Look at those batches, the learning rate and the precision of that layer."


def _gather(mine: dict[str, Any], trainer: Trainer) -> list[dict[str, Any]]:
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    return everyone
