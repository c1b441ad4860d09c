"""One tensor as torch.save writes it, without calling torch.save for each.

Readers of torch.distributed.checkpoint find every tensor as a small archive of torch.save. For one dtype and shape
these archives differ in the tensor's bytes alone, as long as torch leaves out its own checksums: a head and a tail,
made once, go around the bytes. That saves some 300 microseconds for each tensor written or read, and a copy of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_pretrain.distributed.checkpoint._compat import without_crc

ALIGNMENT = 64  # bytes; what torch.save aligns data to within its archive


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, shared with it and writable."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class _Parts:
    """Takes what torch.save writes, but for the bytes of one tensor, which it notices by their address."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._size = tensor.data_ptr(), tensor.nbytes
        self.before = bytearray()
        self.after: bytearray | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.after is not None:
            self.after += view
        elif len(view) == self._size and _address(view) == self._address:
            self.after = bytearray()
        else:
            self.before += view
        return len(view)

    def flush(self) -> None:
        pass


def _address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def _parts(tensor: Tensor) -> tuple[bytes, bytes] | None:
    stream = _Parts(tensor)
    with without_crc():
        torch.save(tensor, stream)  # type: ignore[arg-type]  # write and flush are all it needs
    return None if stream.after is None else (bytes(stream.before), bytes(stream.after))


class Containers:
    """What goes before and after a tensor's bytes, by dtype and shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, bytes] | None] = {}
        zero, one = _parts(torch.zeros(1)), _parts(torch.ones(1))
        # A torch that writes anything else that depends on the values is served by torch.save itself.
        self._usable = zero is not None and zero == one

    def around(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes] | None:
        """Head and tail, or None where torch.save and torch.load have to do it."""
        key = dtype, tuple(shape)
        if key not in self._known:
            sample = torch.empty(shape, dtype=dtype)  # never touched, so it takes no memory
            self._known[key] = _parts(sample) if self._usable and sample.numel() else None
        return self._known[key]
