"""A head whose rows, the vocabulary, are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the whole head this rank holds.

    Args:
        group: The ranks that hold the others.
        first: Token id of this rank's first row.
    """

    group: dist.ProcessGroup
    first: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up in place over the ranks. Every rank of the group calls it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def greatest(self, tensor: Tensor) -> Tensor:
        """The greatest over the ranks, in place. Every rank of the group calls it."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


def local_rows(weight_VC: Tensor) -> tuple[Tensor, VocabularyShard | None]:
    """This rank's rows of a head, and where they stand; a plain weight is whole, with None.

    Args:
        weight_VC: A plain tensor, or one that tensor parallelism has split by rows.

    Raises:
        RuntimeError: The weight is laid out otherwise: it was not gathered for this forward pass.
    """
    if not isinstance(weight_VC, DTensor):
        return weight_VC, None
    if tuple(weight_VC.placements) != (Shard(0),):
        raise RuntimeError(
            "The head's weight is sharded by the strategy; the loss can only be taken inside training_step, "
            "validation_step, test_step, predict_step, forward or generate."
        )
    mesh = weight_VC.device_mesh
    rows = -(-weight_VC.shape[0] // mesh.size())  # every rank but the last ones has this many
    return weight_VC.to_local(), VocabularyShard(mesh.get_group(), mesh.get_local_rank() * rows)


def gathered_logits(hidden_BTC: Tensor, weight_VC: Tensor) -> Tensor:
    """``hidden @ weight.T`` over the whole vocabulary, (B, T, V), on every rank; a new tensor.

    Args:
        hidden_BTC: The same on every rank of a tensor-parallel group.
        weight_VC: Plain, or split by rows.
    """
    if not isinstance(weight_VC, DTensor):
        return F.linear(hidden_BTC, weight_VC)
    local_rows(weight_VC)
    mesh = weight_VC.device_mesh
    logits = F.linear(DTensor.from_local(hidden_BTC, mesh, [Replicate()], run_check=False), weight_VC)
    assert isinstance(logits, DTensor)
    return logits.redistribute(placements=[Replicate()]).to_local()


def targets_here(targets_N: Tensor, *, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target in this rank's shard, 0 where it has none; and whether it has one. Both (N,).

    Args:
        targets_N: Valid token ids.
        first: Token id of the first row.
        rows: Real rows held here.
    """
    local_N = targets_N - first
    here_N = (local_N >= 0) & (local_N < rows)
    return torch.where(here_N, local_N, 0), here_N
