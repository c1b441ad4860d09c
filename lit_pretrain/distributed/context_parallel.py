"""Context parallelism: ranks share each sequence, and only attention looks beyond a rank's own part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lit_pretrain.distributed import _compat
from lit_pretrain.distributed.ring_attention import check_ring, gather_shards, ring_attention
from lit_pretrain.distributed.sequence_order import shard_batch
from lit_pretrain.distributed.tensor_parallel import matches
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.specs.parallel import SETTINGS

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def attention_layers(root: nn.Module, plan: ParallelPlan, *, size: int) -> list[nn.Module]:
    """The layers whose product over the sequence ring attention takes over.

    Args:
        root: The module.
        plan: Names relative to it.
        size: Ranks that share a sequence.

    Raises:
        ConfigError: There are none, or they cannot be taken over.
    """
    found = [(name, m) for name, m in root.named_modules() if any(matches(name, p) for p in plan.attention)]
    kind, setting = type(root).__name__, f"{SETTINGS['cp']}={size}"
    if not found:
        raise ConfigError(
            f"{setting} needs to know the attention layers of {kind}, and its plan names none; give the strategy a "
            "lit_pretrain.specs.ParallelPlan with attention, or use another axis."
        )
    for name, layer in found:
        if not callable(getattr(layer, "attend", None)):
            raise ConfigError(
                f"{setting} puts ring attention in the place of a method attend(q, k, v, context), and {kind}.{name} "
                f"({type(layer).__name__}) has none; give it one, or use another axis."
            )
        check_ring(dropout=float(getattr(layer, "dropout", 0.0) or 0.0), size=size)
    return [layer for _, layer in found]


class SharedSequences:
    """Gives each rank its part of every sequence of a batch, and lets attention reach over all parts.

    Outside of :meth:`active` the model is what it was: generation works on whole sequences.

    Args:
        layers: From :func:`attention_layers`; their ``attend`` is replaced.
        group: The ranks that share each sequence.
        owner: Name of the module's class.
    """

    def __init__(self, layers: list[nn.Module], *, group: dist.ProcessGroup, owner: str) -> None:
        self.owner = owner
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.is_active = False
        self._documents: tuple[Tensor, Tensor] | None = None
        for layer in layers:
            layer.attend = self._attend_over(layer.attend)  # type: ignore[assignment, arg-type]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around what works on parts of sequences: a step, and its backward pass, which may compute forward again."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False
            self._documents = None

    def part(self, batch: Any) -> Part:
        """This rank's part of a batch with ``ids`` (B, T), with positions where it had none.

        Raises:
            ConfigError: The batch is another, or its sequences cannot be shared.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("ids"), Tensor):
            raise ConfigError(
                f"{SETTINGS['cp']}={self.size} cuts batches that are mappings with ids (B, T), and with targets, "
                f"positions and doc_ids of the same shape, not {type(batch).__name__}; name the tensors so in the "
                "data loader."
            )
        return Part(shard_batch(batch, rank=self.rank, size=self.size))

    def _attend_over(self, attend: Attend) -> Attend:
        def ring(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, context: Any) -> Tensor:
            if not self.is_active:
                return attend(q_BHTD, k_BGTD, v_BGTD, context)
            docs = getattr(context, "doc_ids_BT", None)
            with _compat.unobserved():
                documents = None if docs is None else self._gathered(docs)
                return ring_attention(q_BHTD, k_BGTD, v_BGTD, group=self.group, doc_ids_RBT=documents)

        # Messages between ranks have no place in a compiled graph.
        disabled: Attend = torch.compiler.disable(ring)  # type: ignore[no-untyped-call]
        return disabled

    def _gathered(self, docs_BT: Tensor) -> Tensor:
        """Documents on every rank; gathered once for all layers of a pass."""
        if self._documents is None or self._documents[0] is not docs_BT:
            self._documents = docs_BT, gather_shards(docs_BT, group=self.group)
        return self._documents[1]


class Part(dict[str, Any]):
    """A rank's part of a batch, which notes whether its positions were asked for.

    A model that counts positions itself would take each part for a whole sequence, and train on nonsense.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.knows_places = False

    def __getitem__(self, key: str) -> Any:
        self.knows_places |= key == "positions"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        self.knows_places |= key == "positions"
        return super().get(key, default)

    def check(self, step: str) -> None:
        """After a step.

        Raises:
            ConfigError: It did not ask for the positions.
        """
        if not self.knows_places:
            raise ConfigError(
                f"{step} does not read batch['positions'], but with {SETTINGS['cp']} above 1 a rank's tokens are not "
                "the first of their sequences; hand them to the model as its positions."
            )
