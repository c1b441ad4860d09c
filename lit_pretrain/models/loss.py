"""Cross-entropy of a large vocabulary, a few tokens at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_pretrain.models.vocabulary import VocabularyShard, targets_here

IGNORE_INDEX = -100


class LossSums(NamedTuple):
    """Sums over the valid targets of a batch; whoever owns the batch divides.

    Args:
        nll_sum: Sum of ``-log p(target)`` in nats, 0-d, float32 or float64.
        z_loss_sum: Sum of ``z_loss * log(Z)^2``, already weighted; 0-d. Zero where z-loss is off.
        num_targets: Targets that are not -100; 0-d, int64.
    """

    nll_sum: Tensor
    z_loss_sum: Tensor
    num_targets: Tensor


def chunked_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    chunk_size: int,
    shard: VocabularyShard | None = None,
) -> LossSums:
    """Head and cross-entropy in one, never holding more than ``chunk_size`` rows of logits.

    Where a gradient is wanted it is computed along with the loss, while a chunk's logits are at hand: three matrix
    products in all, as without chunks, instead of the four of a recomputation. Rows of ``weight_VC`` from
    ``vocab_size`` on stay outside the log-partition and get a gradient of exactly zero.

    Args:
        hidden_NC: Last hidden states.
        weight_VC: The head's weight, padded to V rows.
        targets_N: Target ids, int64; -100 where nothing is to be predicted.
        vocab_size: Rows of the head that are real tokens.
        z_loss: Weight of the squared log-partition.
        chunk_size: Tokens whose logits are held at once.
        shard: Where ``weight_VC`` stands in a head that is split by rows over ranks, which then all call this with the
            same hidden states and targets, and all get the same sums and the same gradient of the hidden states.

    Returns:
        Sums over the valid targets. Differentiable once.
    """
    grad_enabled = torch.is_grad_enabled()
    device_type = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_NC.dtype
    nll_sum, z_loss_sum = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NC,
        weight_VC,
        targets_N,
        vocab_size,
        z_loss,
        chunk_size,
        torch.float64 if hidden_NC.dtype == torch.float64 else dtype,
        grad_enabled and hidden_NC.requires_grad,
        grad_enabled and weight_VC.requires_grad,
        shard,
    )
    return LossSums(nll_sum, z_loss_sum, (targets_N != IGNORE_INDEX).sum())


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        z_loss: float,
        chunk_size: int,
        dtype: torch.dtype,
        need_hidden: bool,
        need_weight: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden_NC.device.type, enabled=False):
            sums, grads = _sums_and_gradients(
                hidden_NC, weight_VC, targets_N, vocab_size, z_loss, chunk_size, dtype, need_hidden, need_weight, shard
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*grads)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll_grad: Tensor | None, z_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_nll, weight_nll, hidden_z, weight_z = ctx.saved_tensors
        return (
            _combine(hidden_nll, nll_grad, hidden_z, z_grad),
            _combine(weight_nll, nll_grad, weight_z, z_grad),
            *(None,) * 8,
        )


def _combine(
    nll_part: Tensor | None, nll_grad: Tensor | None, z_part: Tensor | None, z_grad: Tensor | None
) -> Tensor | None:
    total = None
    for part, grad in ((nll_part, nll_grad), (z_part, z_grad)):
        if part is not None and grad is not None:
            scaled = part * grad.to(part.dtype)
            total = scaled if total is None else total.add_(scaled)
    return total


def _sums_and_gradients(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    z_loss: float,
    chunk_size: int,
    dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    shard: VocabularyShard | None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    """Loss sums, and the gradients of each sum for hidden states and weight: (nll, nll, z, z), None where unwanted."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first = shard.first if shard is not None else 0
    rows_here = max(0, min(vocab_size - first, weight_VC.shape[0]))
    hidden, weight = hidden_NC.to(dtype), weight_VC.to(dtype)[:rows_here]
    if rows_here == 0:  # a rank with nothing but padding takes part with one row that no probability falls on
        weight = hidden.new_zeros(1, hidden.shape[1])
    use_z = z_loss > 0.0
    nll_sum = torch.zeros((), dtype=wide, device=hidden.device)
    z_sum = torch.zeros_like(nll_sum)
    hidden_nll = torch.empty_like(hidden_NC) if need_hidden else None
    hidden_z = torch.empty_like(hidden_NC) if need_hidden and use_z else None
    weight_nll = torch.zeros_like(weight_VC, dtype=wide) if need_weight else None
    weight_z = torch.zeros_like(weight_VC, dtype=wide) if need_weight and use_z else None
    # One buffer for all chunks, changed in place: on a CPU, touching fresh memory costs a quarter of the whole loss.
    buffer_nV = torch.empty(min(chunk_size, hidden.shape[0]), weight.shape[0], dtype=dtype, device=hidden.device)

    for start in range(0, hidden.shape[0], chunk_size):
        rows = slice(start, start + chunk_size)
        h_nC, targets_n = hidden[rows], targets_N[rows]
        valid_n = targets_n != IGNORE_INDEX
        target_n1 = torch.where(valid_n, targets_n, 0)[:, None]
        here_n1: Tensor | None = None
        if shard is not None:
            target_n1, here_n1 = targets_here(target_n1, first=first, rows=rows_here)
        narrow_nV = torch.mm(h_nC, weight.t(), out=buffer_nV[: h_nC.shape[0]])
        if rows_here == 0:
            narrow_nV.fill_(float("-inf"))
        logits_nV = narrow_nV.to(wide)
        # Log Z as the greatest logit plus the log of a sum in which that logit counts 1: no overflow.
        target_logit_n1 = logits_nV.gather(1, target_n1)
        greatest_n1 = logits_nV.amax(dim=1, keepdim=True)
        if shard is not None:
            greatest_n1 = shard.greatest(greatest_n1)
        exp_nV = logits_nV.sub_(greatest_n1).exp_()
        sum_n1 = exp_nV.sum(dim=1, keepdim=True)
        if shard is not None and here_n1 is not None:
            mine_n1 = torch.where(here_n1, target_logit_n1, 0.0)
            target_logit_n1, sum_n1 = shard.sum(torch.stack((mine_n1, sum_n1))).unbind()  # one reduction for both
        log_sum_n1 = sum_n1.log()
        nll_n1 = (greatest_n1 - target_logit_n1) + log_sum_n1
        nll_sum += torch.where(valid_n, nll_n1[:, 0], 0.0).sum()
        log_z_n1 = greatest_n1 + log_sum_n1
        if use_z:
            z_sum += z_loss * torch.where(valid_n, log_z_n1[:, 0].square(), 0.0).sum()
        if not (need_hidden or need_weight):
            continue

        # d nll / d logits = p - onehot. Rows without a target drop out through valid_n, on the narrow side of the
        # products, where it costs C instead of V.
        valid_n1 = valid_n[:, None].to(dtype)
        grad_nV = exp_nV.mul_(sum_n1.reciprocal())
        minus_n1 = grad_nV.new_full((), -1.0).expand_as(target_n1) if here_n1 is None else -here_n1.to(grad_nV.dtype)
        grad_nV.scatter_add_(1, target_n1, minus_n1)
        if dtype != wide:
            grad_nV = narrow_nV.copy_(grad_nV)
        z_scale_n1 = (2.0 * z_loss * log_z_n1).to(dtype) * valid_n1 if use_z else None
        if hidden_nll is not None:
            product_nC = torch.mm(grad_nV, weight)
            hidden_nll[rows] = product_nC * valid_n1
            if hidden_z is not None and z_scale_n1 is not None:
                # d (log Z)^2 / d logits = 2 log Z p, and p = (p - onehot) + onehot.
                at_target_nC = weight[target_n1[:, 0]]
                hidden_z[rows] = (product_nC + _only(at_target_nC, here_n1)) * z_scale_n1
        if weight_nll is not None:
            grad_Vn = grad_nV.t()[:rows_here]
            _add_product(weight_nll[:rows_here], grad_Vn, h_nC * valid_n1)
            if weight_z is not None and z_scale_n1 is not None:
                scaled_nC = h_nC * z_scale_n1
                _add_product(weight_z[:rows_here], grad_Vn, scaled_nC)
                if rows_here:
                    weight_z.index_add_(0, target_n1[:, 0], _only(scaled_nC, here_n1).to(wide))
    if shard is not None:
        for part in (hidden_nll, hidden_z):
            if part is not None:
                shard.sum(part)  # each rank has seen what its own rows add to it
    weight_nll, weight_z = (None if g is None else g.to(weight_VC.dtype) for g in (weight_nll, weight_z))
    return (nll_sum, z_sum), (hidden_nll, weight_nll, hidden_z, weight_z)


def _only(rows_nC: Tensor, here_n1: Tensor | None) -> Tensor:
    """The rows whose target this rank holds, zeros for the others; all of them where the head is whole."""
    return rows_nC if here_n1 is None else rows_nC * here_n1


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, summed over chunks in the wide dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
