"""Gradients of the mean over all valid targets of a global batch, whatever its split into microbatches and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lit_pretrain.distributed.grad_norm import scale_gradients
from lit_pretrain.specs import LossRanks

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor


class TargetWeighting:
    """Makes accumulated, data-parallel gradients equal to those of one big batch, also when targets are masked.

    Lightning divides each microbatch's loss by ``accumulate_grad_batches`` and data parallelism averages gradients over
    ranks. A mean per microbatch would therefore weigh a target by how few others share its microbatch. This object
    divides every sum by the same nominal count instead, and once per update, when the window is complete, multiplies
    the gradients by nominal / actual.

    Use it from any LightningModule with automatic optimization::

        def training_step(self, batch, batch_idx):
            loss_sum, num_targets = ...
            return self.weighting.scale(loss_sum, num_targets, nominal=batch["targets"].numel())

        def on_after_backward(self):
            mean_loss = self.weighting.finish(self)  # None inside a window

    The factor is applied after the backward pass of the window's last microbatch: before any callback's
    ``on_before_optimizer_step``, so every gradient norm and every clip sees true gradients. Under fp16 loss scaling it
    commutes with unscaling.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # [valid targets, loss], summed over the window on this rank
        self._nominal: int | Tensor = 0  # targets of the window's first microbatch
        self._parts = 1  # microbatches that a pipeline cuts each batch into

    def scale(self, loss_sum: Tensor, num_targets: Tensor, *, nominal: int, report: Tensor | None = None) -> Tensor:
        """Divide a microbatch's loss sum by the nominal target count.

        Args:
            loss_sum: Sum of the training loss over the valid targets, 0-d.
            num_targets: Valid targets in the microbatch, 0-d.
            nominal: Targets in the microbatch, masked or not; at least 1.
            report: Sum to report instead of ``loss_sum`` (the loss without its regulariser), 0-d.

        Returns:
            The loss to return from ``training_step``, 0-d.
        """
        seen = loss_sum if report is None else report
        # float64 holds any token count exactly; MPS has no float64.
        wide = torch.float32 if loss_sum.device.type == "mps" else torch.float64
        sums = torch.stack([num_targets.detach().to(wide), seen.detach().to(wide)])
        if self._sums is None:
            self._sums, self._nominal = sums, nominal
        else:
            self._sums = self._sums + sums
        return loss_sum / self._nominal

    def finish(self, module: pl.LightningModule) -> Tensor | None:
        """Close the accumulation window, if this was its last microbatch.

        Every rank calls it after every backward pass; it reduces two numbers over the ranks once per update.

        Returns:
            Mean loss per valid target over the global batch, 0-d; None inside a window; NaN without a valid target.
        """
        trainer = module.trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if batches % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return None
        if self._sums is None:
            raise RuntimeError("TargetWeighting.finish() without scale(): return scale(...) from training_step.")
        # Ranks of a tensor-parallel group see the same targets: they count once, and the reduction leaves them out.
        strategy = trainer.strategy
        ranks = strategy.num_loss_ranks if isinstance(strategy, LossRanks) else trainer.world_size
        sums, nominal = self._sums, self._nominal * self._parts * trainer.accumulate_grad_batches * ranks
        self._sums, self._nominal = None, 0
        if ranks > 1:
            sums = self._over_ranks(strategy, sums)
        self._rescale(module, sums[0], nominal)
        return sums[1] / sums[0]

    @staticmethod
    def _over_ranks(strategy: Any, sums: Tensor) -> Tensor:
        """The sums of all ranks that see different targets.

        One reduce and no barrier: Lightning's own ``reduce`` puts one before it, which on a GPU waits for the device.
        An asynchronous reduce, begun before the backward pass, would gain nothing: the factor is needed right after
        that pass, whose reduction of gradients has just brought the ranks together, and NCCL's waits on its stream.
        """
        if isinstance(strategy, LossRanks) or not (dist.is_available() and dist.is_initialized()):
            return strategy.reduce(sums, reduce_op="sum")  # type: ignore[no-any-return]
        dist.all_reduce(sums)
        return sums

    @staticmethod
    def _rescale(module: pl.LightningModule, num_targets: Tensor, nominal: int | Tensor) -> None:
        if num_targets.device.type == "cpu" and int(num_targets) == nominal:
            return  # nothing was masked; on other devices, asking would synchronise
        factor = torch.where(num_targets > 0, nominal / num_targets, torch.ones_like(num_targets))
        scale_gradients((p.grad for p in module.parameters() if p.grad is not None), factor)

    def sums(self) -> Tensor:
        """What :meth:`finish` needs of this window so far: valid targets, loss, targets of a microbatch."""
        if self._sums is None:
            raise RuntimeError("TargetWeighting.sums() without scale(): return scale(...) from training_step.")
        return torch.cat([self._sums, self._sums.new_tensor([float(self._nominal)])])

    def set_sums(self, sums: Tensor, *, parts: int) -> None:
        """Go on with the sums of another rank: that of a pipeline's last stage, where the training step ran.

        Args:
            sums: From :meth:`sums`.
            parts: Microbatches that the pipeline cuts each batch into.
        """
        self._parts = parts
        if self._sums is None:  # else the step ran here, and the microbatch's size is known without waiting for it
            self._nominal = sums[2]
        self._sums = sums[:2]

    def drop(self) -> None:
        """Forget an unfinished window (a run that was interrupted and fits again)."""
        self._sums, self._nominal = None, 0
