"""Small agreements between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def equal_on_ranks(value: int, *, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a number is the same on every rank of a group. Every rank of it calls; all get the same answer.

    Args:
        value: Fits 63 bits.
        group: The ranks to ask; None for all.
        device: Where the group's backend communicates.
    """
    bounds = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    greatest, negated_least = bounds.tolist()
    return bool(greatest == -negated_least)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number below 2^62 that differs between tensors that differ in shape, type or value. Waits for the device."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 2


def greatest(value: int, *, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The greatest of a number over a group. Every rank of it calls."""
    out = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return int(out)
