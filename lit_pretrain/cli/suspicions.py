"""Settings that are legal and probably not meant: each a sentence with the setting, the reason and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lit_pretrain import units
from lit_pretrain.cli.numbers import finite
from lit_pretrain.cli.outlook import Outlook, get, on_gpu, whole
from lit_pretrain.corpus.holdout import FEW_TOKENS
from lit_pretrain.planning.memory import precision_word

USUAL_WARMUP = 0.1
"""Of the run: the usual is 1 to 5%, or 1,000 to 4,000 updates."""
REPEATS = 4.0
"""Passes over the data up to which repeated text is worth about as much as new (Muennighoff et al. 2023, figure 1)."""
FAR = 10.0
"""How many times the usual learning rate is suspicious: published recipes lie within a factor of 5."""
_SAVERS = ("RunCheckpoint", "ModelCheckpoint")
SPARE = 2**30
"""Bytes: a microbatch that needs less than half of it could be twice as large on any GPU."""


def suspicions(outlook: Outlook) -> list[str]:
    """Every suspicious setting of a run; a rule whose figures are not known says nothing."""
    return [sentence for rule in _RULES for sentence in rule(outlook)]


def usual_rate(non_embedding: int) -> float:
    """A usual peak learning rate for AdamW.

    Source: Kaplan et al. 2020, equation D.1, not below GPT-3's 6e-5 (Brown et al. 2020, table 2.1).

    Args:
        non_embedding: Parameters without embeddings.
    """
    return max(6e-5, 0.003239 - 0.0001395 * math.log(max(non_embedding, 1)))


def _warmup(o: Outlook) -> Iterator[str]:
    if o.rates is None or not o.updates or o.rates.warmup_updates <= max(1.0, USUAL_WARMUP * o.updates):
        return
    given = next(
        (f"schedule.{k}={v}" for k, v in o.config["schedule"].items() if k.startswith("warmup_") and v is not None),
        "schedule",
    )
    yield (
        f"{given} is a warmup of {o.rates.warmup_updates:,.0f} of {o.updates:,} updates, more than "
        f"{USUAL_WARMUP:.0%} of the run, which spends them below the peak rate; use schedule.warmup_fraction=0.02 "
        f"(and null for the others)."
    )


def _rate(o: Outlook) -> Iterator[str]:
    lr = finite(get(o.config, "optimizer.lr"))
    if o.parameters is None or lr is None:
        return
    usual = usual_rate(o.parameters.non_embedding)
    if lr > FAR * usual:
        yield (
            f"optimizer.lr={lr:g} is {lr / usual:.0f} times what is usual for "
            f"{units.count(o.parameters.non_embedding)} parameters and will probably diverge; try "
            f"optimizer.lr={usual:.1e}."
        )


def _batch(o: Outlook) -> Iterator[str]:
    if get(o.config, "batch.global_batch_size") == 1:
        yield (
            "batch.global_batch_size=1 makes every update from one sequence, so gradients are mostly noise; use 16 or "
            "more and keep batch.micro_batch_size small if memory is short."
        )


def _small_microbatch(o: Outlook) -> Iterator[str]:
    accumulation, micro = whole(get(o.config, "batch.accumulation")), whole(get(o.config, "batch.micro_batch_size"))
    if o.memory is None or not on_gpu(o.config) or accumulation is None or micro is None:
        return
    used = o.memory.activations + o.memory.loss
    if used < SPARE / 2 and accumulation % 2 == 0:
        yield (
            f"batch.micro_batch_size={micro} needs {units.size(used)} beside the model and is repeated {accumulation} "
            f"times per update, which leaves a GPU idle; use batch.micro_batch_size={2 * micro} or more."
        )


def _data_size(o: Outlook) -> Iterator[str]:
    if o.tokens is None:
        return
    if o.parameters is not None and o.tokens < o.parameters.total:
        yield (
            f"length: {units.count(o.tokens)} tokens are {o.tokens / o.parameters.total:.2g} per parameter, where 20 "
            f"use the compute best (Hoffmann et al. 2022); train longer or a smaller model, unless this is a test."
        )
    if o.corpus is not None and o.tokens > REPEATS * o.corpus.total:
        yield (
            f"length: {units.count(o.tokens)} tokens read the {units.count(o.corpus.total)} of data.corpus "
            f"{o.tokens / o.corpus.total:.1f} times, and beyond {REPEATS:g} times the same text teaches little; add "
            f"data or shorten the run."
        )


def _vocabulary(o: Outlook) -> Iterator[str]:
    if o.architecture is None or o.corpus is None or o.corpus.vocab_size is None:
        return
    rows, needed = o.architecture.vocab_size, o.corpus.vocab_size
    if rows > 1.1 * needed:
        yield (
            f"model.vocab_size={rows} is larger than the tokenizer's {needed}, so {rows - needed} rows are never "
            f"trained; use model.vocab_size={needed}."
        )


def _sequence(o: Outlook) -> Iterator[str]:
    length, model = whole(get(o.config, "batch.sequence_length")), o.architecture
    if length is None:
        return
    if length % 64:
        yield (
            f"batch.sequence_length={length} is no multiple of 64, the tile of fast matrix and attention kernels; use "
            f"{max(64, round(length / 64) * 64)}."
        )
    if model is not None and model.position == "learned" and length < model.block_size:
        yield (
            f"batch.sequence_length={length} leaves the positions from {length} to model.block_size={model.block_size} "
            f"untrained, and text of that length is then garbage; use model.block_size={length}."
        )


def _validation(o: Outlook) -> Iterator[str]:
    every = whole(get(o.config, "validation.every_steps"))
    if get(o.config, "trainer.limit_val_batches") == 0:
        yield "trainer.limit_val_batches=0 turns validation off, so nobody sees whether the model learns; leave it out."
    elif o.corpus is not None and not o.corpus.held_out:
        yield "data.corpus holds no text out, so there is no validation; name some with data.corpus.validation."
    elif o.corpus is not None and o.corpus.held_out < FEW_TOKENS:
        yield (
            f"data.corpus holds out {o.corpus.held_out:,} tokens, and a validation loss over fewer than {FEW_TOKENS:,} "
            f"says little; hold out more, with prepare by validation_fraction=...."
        )
    if o.updates and every is not None and every > o.updates and get(o.config, "trainer.limit_val_batches") != 0:
        yield (
            f"validation.every_steps={every} is beyond the {o.updates:,} updates of the run, which validates at its "
            f"end only; use validation.every_steps={max(1, o.updates // 4)}."
        )


def _saving(o: Outlook) -> Iterator[str]:
    callbacks = get(o.config, "callbacks") or {}
    nodes = callbacks if isinstance(callbacks, Mapping) else {}
    savers = {n: node for n, node in nodes.items() if str(get(node, "_target_", "")).endswith(_SAVERS)}
    if get(o.config, "trainer.fast_dev_run"):
        yield "trainer.fast_dev_run saves and logs nothing; drop debug=fast for a run to keep."
        return
    if not savers:
        yield "callbacks: no checkpoint is written, so the trained model is lost at the end; use callbacks=default."
    for name, node in savers.items():
        key = next((key for key in ("every_n_steps", "every_n_train_steps") if get(node, key) is not None), "")
        every = whole(get(node, key)) if key else None
        if o.updates and every is not None and every > o.updates:
            yield (
                f"callbacks.{name}.{key}={every} is beyond the {o.updates:,} updates of the run, so one "
                f"that dies leaves nothing; use {max(1, o.updates // 4)}."
            )


def _clipping(o: Outlook) -> Iterator[str]:
    callbacks = get(o.config, "callbacks") or {}
    targets = [str(get(n, "_target_")) for n in callbacks.values()] if isinstance(callbacks, Mapping) else []
    if not any("Clip" in t for t in targets) and not get(o.config, "trainer.gradient_clip_val"):
        yield (
            "callbacks: gradients are not clipped, so one bad batch can spoil the weights; use callbacks=default or "
            "callbacks=minimal, which clip at 1."
        )


def _precision(o: Outlook) -> Iterator[str]:
    precision = precision_word(get(o.config, "trainer.precision"))
    if on_gpu(o.config) and precision in ("32", "32-true"):
        yield f"trainer.precision={precision} leaves most of a GPU's speed unused; use precision=bf16."


_RULES: tuple[Callable[[Outlook], Any], ...] = (
    _batch,
    _small_microbatch,
    _data_size,
    _warmup,
    _rate,
    _vocabulary,
    _sequence,
    _validation,
    _saving,
    _clipping,
    _precision,
)
