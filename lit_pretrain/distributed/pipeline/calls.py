"""Cutting batches and calls into microbatches by rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lit_pretrain.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """What a model was called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def split(self, parts: int) -> list[Call]:
        """The calls of all microbatches.

        Raises:
            ConfigError: The rows cannot be cut into equal parts.
        """
        rows = rows_of((self.args, self.kwargs))
        if rows is None:
            raise ConfigError("The pipelined model was called without a tensor that has rows to cut into microbatches.")
        if rows % parts:
            raise ConfigError(
                f"The pipelined model was called with {rows} rows, which {parts} microbatches cannot share; use a "
                f"multiple of {parts}."
            )
        pieces = split((self.args, dict(self.kwargs)), parts, rows=rows)
        return [Call(args, kwargs) for args, kwargs in pieces]


def rows_of(value: Any) -> int | None:
    """Rows of the first tensor in a nest of containers; None without one."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            rows = rows_of(item)
            if rows is not None:
                return rows
    return None


def split(value: Any, parts: int, *, rows: int) -> list[Any]:
    """The same nest of containers for each microbatch, with its share of the rows; tensors become views.

    Lists without a tensor are cut where they have an item for each row; numbers, strings and 0-d tensors go to all.

    Args:
        value: A batch.
        parts: Microbatches; divides ``rows``.
        rows: Rows of every tensor.

    Raises:
        ConfigError: A tensor has another number of rows.
    """
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return [value] * parts
        if value.shape[0] != rows:
            raise ConfigError(
                f"A tensor of shape {tuple(value.shape)} in a batch of {rows} rows cannot be cut into microbatches; a "
                "pipeline needs the rows first in every tensor of the batch."
            )
        return [value[i : i + rows // parts] for i in range(0, rows, rows // parts)]
    if isinstance(value, Mapping):
        pieces = {key: split(item, parts, rows=rows) for key, item in value.items()}
        return [_like(value, {key: piece[i] for key, piece in pieces.items()}) for i in range(parts)]
    if isinstance(value, list | tuple):
        if len(value) == rows and rows_of(value) is None:
            size = rows // parts
            return [value[i * size : (i + 1) * size] for i in range(parts)]
        columns = [split(item, parts, rows=rows) for item in value]
        return [_sequence(value, [column[i] for column in columns]) for i in range(parts)]
    return [value] * parts


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return items if type(mapping) is dict else type(mapping)(items)  # type: ignore[call-arg]


def _sequence(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*items)
    return type(value)(items)
