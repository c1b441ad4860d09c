"""How well a trained model predicts text: sums over all targets, per source."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_pretrain.corpus import IGNORED, Windows, read_rows
from lit_pretrain.corpus.baselines import CrossEntropy
from lit_pretrain.data.validation import validation_rows
from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT

Rows = Mapping[str, NDArray[np.int64]]
"""A batch: ``ids`` and ``targets`` (B, T), ``source`` (B,); under document isolation ``positions`` and ``doc_ids``."""

_DTYPES = {
    "64": torch.float64,
    "64-true": torch.float64,
    "32": torch.float32,
    "32-true": torch.float32,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}
_MIXED = {"16": torch.float16, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_MASTERS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(model: GPT, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Put a model into one of Lightning's precisions; evaluate it inside the result.

    Args:
        model: Changed in place.
        precision: A word of ``Trainer(precision=...)``, or ``bf16`` or ``fp16`` of a ``MasterWeightPrecision``.

    Raises:
        ConfigError: It is none that a model can be evaluated in here.
    """
    if precision in _DTYPES:
        model.to(_DTYPES[precision])
        return contextlib.nullcontext()
    if precision in _MASTERS:
        model.to(_MASTERS[precision])  # the copies that such a run computes with
        return torch.autocast(model.wte.weight.device.type, _MASTERS[precision])
    if precision in _MIXED:
        device = model.wte.weight.device.type
        # As Lightning does: a CPU has no products in float16.
        return torch.autocast(device, torch.bfloat16 if device == "cpu" else _MIXED[precision])
    raise ConfigError(f"as_precision={precision} is unknown; use one of {', '.join([*_DTYPES, *_MIXED, *_MASTERS])}.")


def held_out_batches(
    windows: Sequence[Windows | None],
    *,
    batch_size: int,
    max_tokens: int | None = None,
    isolate_documents: bool = False,
    padding: int = 0,
) -> Iterator[Rows]:
    """Held-out windows, each once: the rows that validation reads.

    Args:
        windows: Per source; None for a source without.
        batch_size: Rows at once.
        max_tokens: At most so many targets, spread as validation spreads them; None for all.
        isolate_documents: As in training.
        padding: Id in inputs that stand for nothing.
    """
    present = [w for w in windows if w is not None]
    if not present:
        return
    most = None if max_tokens is None else max(1, max_tokens // present[0].sequence_length)
    source, window = validation_rows(windows, max_windows=most)
    filled = [w if w is not None else present[0] for w in windows]
    for low in range(0, source.size, batch_size):
        rows = slice(low, low + batch_size)
        batch = read_rows(
            filled,
            source=source[rows],
            window=window[rows],
            isolate_documents=isolate_documents,
            padding=padding,
        )
        yield {**batch, "source": source[rows]}


def strided_batches(
    documents: Sequence[Sequence[int]], *, length: int, stride: int, batch_size: int, padding: int = 0
) -> Iterator[Rows]:
    """Windows over each document in which every token but the first is a target exactly once.

    The first window predicts all of its targets; each later one ends ``stride`` tokens further and predicts only those,
    with the ``length - stride`` tokens before them as context.

    Args:
        documents: Token ids, at least 2 each.
        length: Inputs per window.
        stride: New targets per window, 1 to ``length``.
        batch_size: Rows at once.
        padding: Id in inputs beyond the end of a document.
    """
    rows: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
    for number, document in enumerate(documents):
        ids = np.asarray(document, np.int64)
        done, last = 0, ids.size - 1
        while done < last:
            end = min(max(done + stride, length), last)
            begin = max(0, end - length)
            inputs, targets = np.full(length, padding, np.int64), np.full(length, IGNORED, np.int64)
            inputs[: end - begin] = ids[begin:end]
            targets[done - begin : end - begin] = ids[done + 1 : end + 1]
            rows.append((inputs, targets, number))
            done = end
            if len(rows) == batch_size:
                yield _stacked(rows)
                rows = []
    if rows:
        yield _stacked(rows)


def _stacked(rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]]) -> Rows:
    ids, targets, source = zip(*rows, strict=True)
    return {"ids": np.stack(ids), "targets": np.stack(targets), "source": np.asarray(source, np.int64)}


@torch.no_grad()
def score(
    model: GPT, batches: Iterable[Rows], *, names: Sequence[str], token_bytes: NDArray[np.int64] | None
) -> dict[str, CrossEntropy]:
    """The cross-entropy of a model on each source that has a target.

    Args:
        model: In evaluation mode, where it is.
        batches: What to predict.
        names: Of the sources, by their number.
        token_bytes: UTF-8 bytes per token id, (V,); None when unknown.
    """
    device = model.wte.weight.device
    found: dict[str, CrossEntropy] = {}
    for batch in batches:
        ids, targets, positions, documents = (
            torch.from_numpy(batch[key]).to(device) if key in batch else None
            for key in ("ids", "targets", "positions", "doc_ids")
        )
        assert ids is not None
        assert targets is not None
        hidden = model(ids, positions, documents)
        for number in np.unique(batch["source"]).tolist():
            rows = torch.from_numpy(batch["source"] == number).to(device)
            kept = batch["targets"][batch["source"] == number]
            kept = kept[kept != IGNORED]
            if not kept.size:
                continue
            nats = float(model.loss(hidden[rows], targets[rows]).nll_sum)
            num_bytes = None if token_bytes is None else int(token_bytes[kept].sum())
            part = CrossEntropy(nats, int(kept.size), num_bytes)
            found[names[number]] = found[names[number]] + part if names[number] in found else part
    return {name: found[name] for name in names if name in found}


def perplexity(entropy: CrossEntropy) -> float:
    """``exp`` of the nats per token; infinite where that overflows."""
    try:
        return math.exp(entropy.nats_per_token)
    except OverflowError:
        return math.inf
