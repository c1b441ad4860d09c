"""Keys and values of tokens already seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_pretrain.specs import GPTConfig


class LayerCache:
    """Keys and values of one block: (B, S, kv heads, D), allocated once.

    Args:
        k_BSHD: Keys.
        v_BSHD: Values.
    """

    def __init__(self, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        self.k_BSHD = k_BSHD
        self.v_BSHD = v_BSHD

    def append(self, k_BTHD: Tensor, v_BTHD: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
        """Write new tokens behind the ``start`` known ones; returns views of all of them.

        A tensor-parallel rank brings its own heads only, and uses so much of the memory.
        """
        end, heads = start + k_BTHD.shape[1], k_BTHD.shape[2]
        self.k_BSHD[:, start:end, :heads] = k_BTHD
        self.v_BSHD[:, start:end, :heads] = v_BTHD
        return self.k_BSHD[:, :end, :heads], self.v_BSHD[:, :end, :heads]


class KVCache:
    """The cache of a whole model: ``forward(..., cache=cache)`` appends to it.

    Grouped-query models store their ``n_kv_head`` heads only. A row may belong to several documents: ids given with
    the tokens are remembered, and no query sees a key of another document.

    Args:
        config: The architecture.
        batch_size: Rows.
        max_length: Slots a row; at most ``config.block_size`` is useful.
        layers: Keys of the model's blocks; None means all of ``config.n_layer``.
        device: Where the model is.
        dtype: Of keys and values.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        batch_size: int,
        max_length: int,
        layers: tuple[str, ...] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (batch_size, max_length, config.num_kv_heads, config.head_size)
        names = layers if layers is not None else tuple(str(i) for i in range(config.n_layer))
        self.layers = {
            name: LayerCache(
                torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
            )
            for name in names
        }
        self.max_length = max_length
        self.length = 0
        self.doc_ids_BS: Tensor | None = None
        self._doc_buffer_BS = torch.zeros(shape[:2], device=device, dtype=torch.int64)

    def remember_documents(self, doc_ids_BT: Tensor | None, *, length: int) -> Tensor | None:
        """Store the document ids of ``length`` new tokens; returns those of all tokens, or None if never given."""
        end = self.length + length
        if doc_ids_BT is not None:
            self._doc_buffer_BS[:, self.length : end] = doc_ids_BT
            self.doc_ids_BS = self._doc_buffer_BS
        return None if self.doc_ids_BS is None else self.doc_ids_BS[:, :end]

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length = 0
        self.doc_ids_BS = None
        self._doc_buffer_BS.zero_()
