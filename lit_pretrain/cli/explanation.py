"""The figures of a run to come, as titled rows of text."""

from __future__ import annotations

from dataclasses import dataclass

from lit_pretrain import units
from lit_pretrain.cli.numbers import finite
from lit_pretrain.cli.outlook import Outlook, get, has_adam, is_replicated, whole
from lit_pretrain.cli.table import Section
from lit_pretrain.planning.memory import precision_word

UNKNOWN = "not known"
BEST_RATIO = 20
"""Tokens per parameter that use the compute best (Hoffmann et al. 2022)."""
PF_DAY = 1e15 * 86400
"""FLOPs of a day at one PFLOP/s."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a run is computed on.

    Args:
        name: Of one device; None when nobody says.
        peak: Its FLOP/s; None when it is not in the table.
        utilisation: Share of the peak that training reaches.
    """

    name: str | None
    peak: float | None
    utilisation: float


def sections(outlook: Outlook, hardware: Hardware) -> list[Section]:
    """Everything to print, in order."""
    return [
        _batch(outlook),
        _length(outlook),
        _rates(outlook),
        _model(outlook),
        _compute(outlook, hardware),
        _memory(outlook),
    ]


def _batch(o: Outlook) -> Section:
    batch = get(o.config, "batch") or {}
    keys = ("global_batch_size", "sequence_length", "micro_batch_size", "accumulation", "data_parallel_size")
    sequences, length, micro, accumulation, ranks = (whole(get(batch, key)) for key in keys)
    rows = [("update", UNKNOWN)]
    if o.tokens_per_update and sequences and length:
        rows = [("update", f"{sequences} sequences x {length} tokens = {o.tokens_per_update:,} tokens")]
    if length and micro and accumulation and ranks:
        rows += [
            ("made of", f"microbatches {accumulation} x sequences {micro} x data-parallel ranks {ranks}"),
            ("microbatch", f"{micro} x {length} = {micro * length:,} tokens on each rank and forward pass"),
        ]
    else:
        rows.append(("made of", UNKNOWN))
    rows.append(("ranks", _ranks(o)))
    return Section("batch", rows)


def _ranks(o: Outlook) -> str:
    if o.ranks is None:
        return UNKNOWN
    nodes = get(o.config, "trainer.num_nodes", 1)
    where = f" on {nodes} nodes" if nodes != 1 else ""
    return f"{o.ranks}{where}, {get(o.config, 'trainer.accelerator', 'auto')}"


def _length(o: Outlook) -> Section:
    rows = [
        ("updates", UNKNOWN if o.updates is None else f"{o.updates:,}"),
        ("tokens", UNKNOWN if o.tokens is None else f"{units.count(o.tokens)} ({o.tokens:,})"),
    ]
    if o.corpus is None:
        rows.append(("passes", o.corpus_unknown or UNKNOWN))
    else:
        parts = ", ".join(f"{name} {units.count(n)}" for name, n in o.corpus.tokens.items())
        passes = UNKNOWN if o.tokens is None else f"{o.tokens / o.corpus.total:.3g}"
        rows.append(("passes", f"{passes} over {units.count(o.corpus.total)} tokens ({parts})"))
    every, most = whole(get(o.config, "validation.every_steps")), whole(get(o.config, "validation.max_tokens"))
    if every is not None:
        held = "all" if most is None else f"at most {units.count(most)}"
        if o.corpus is not None:
            held = units.count(min(o.corpus.held_out, most or o.corpus.held_out))
        rows.append(("validation", f"every {every:,} updates and at the end, on {held} tokens held out"))
    return Section("length", rows)


def _rates(o: Outlook) -> Section:
    name = str(get(o.config, "schedule._target_", "none")).rpartition(".")[2]
    peak = finite(get(o.config, "optimizer.lr"))
    rows = [("schedule", name)]
    if o.rates is None or o.tokens_per_update is None:
        return Section("learning rate", [*rows, ("course", UNKNOWN)])
    for what, length in (("warmup", o.rates.warmup_updates), ("decay", o.rates.decay_updates)):
        rows.append((what, f"{length:,.0f} updates, {units.count(length * o.tokens_per_update)} tokens"))
    if peak is not None:
        rates = [("first", o.rates.first * peak), ("peak", peak), ("last", o.rates.last * peak)]
        rows += [(f"{what} update" if what != "peak" else "peak", f"{rate:.4g}") for what, rate in rates]
    else:
        rows.append(("rates", f"first {o.rates.first:.3g}, last {o.rates.last:.3g} of a peak that is not known"))
    return Section("learning rate", rows)


def _model(o: Outlook) -> Section:
    if o.architecture is None or o.parameters is None:
        return Section("model", [("parameters", f"{UNKNOWN} of {get(o.config, 'model._target_', 'no model')}")])
    model, count = o.architecture, o.parameters
    real = count.total - count.padding
    rows = [
        ("parameters", f"{units.count(real)} ({real:,})"),
        ("without embeddings", f"{units.count(count.non_embedding)} ({count.non_embedding:,})"),
        ("padding", f"{count.padding:,} more, for {model.padded_vocab_size - model.vocab_size} rows that are no token"),
        ("shape", f"{model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, context {model.block_size}"),
    ]
    if not count.padding:
        del rows[2]
    if o.tokens is not None:
        rows.append(("tokens/parameter", f"{o.tokens / real:.3g} (best use of compute: about {BEST_RATIO})"))
    return Section("model", rows)


def _compute(o: Outlook, hardware: Hardware) -> Section:
    per_token = o.flops_per_token
    if per_token is None:
        return Section("compute", [("FLOPs", UNKNOWN)])
    rows = [("FLOPs per token", f"{per_token:.4g} (6 N + 12 L H D T: forward and backward)")]
    if o.tokens is None:
        return Section("compute", [*rows, ("in total", UNKNOWN)])
    total = per_token * o.tokens
    rows.append(("in total", f"{total:.4g} FLOPs, {total / PF_DAY:.3g} PFLOP/s-days"))
    if hardware.peak is None or o.ranks is None:
        what = "the device is not known" if hardware.name is None else f"the peak of {hardware.name} is not known"
        return Section("compute", [*rows, ("time", f"{what}; name one: explain.device=H100")])
    seconds = total / (hardware.peak * hardware.utilisation * o.ranks)
    rows.append(
        (
            "time",
            f"{units.duration(seconds)}, {seconds * o.ranks / 3600:,.3g} device-hours, on {o.ranks} x {hardware.name} "
            f"({hardware.peak / 1e12:g} TFLOP/s in 16 bits) at {hardware.utilisation:.0%} of the peak",
        )
    )
    return Section("compute", rows)


def _memory(o: Outlook) -> Section:
    rows = [("holds", _holds(o))]
    m = o.memory
    if m is None:
        return Section("memory of a rank", [*rows, ("bytes", o.memory_unknown)])
    mode = get(o.config, "module.activation_checkpointing", "none")
    precision = precision_word(get(o.config, "trainer.precision"))
    copied = "all weights" if precision in ("bf16", "fp16") else "the blocks' matrices, made by autocast"
    optimizer = units.size(m.optimizer) if has_adam(o.config) else f"{UNKNOWN}, not counted"
    rows += [
        ("weights", f"{units.size(m.weights)} (precision {precision})"),
        ("gradients", units.size(m.gradients) + (f" + {units.size(m.buckets)} of buckets" if m.buckets else "")),
        ("optimizer", optimizer),
        ("16-bit copies", f"{units.size(m.casts)} of {copied}" if m.casts else "none"),
        ("activations", f"{units.size(m.activations)} (activation checkpointing: {mode})"),
        ("loss", f"{units.size(m.loss)} (a chunk of logits, gradients of hidden states and head)"),
        ("together", f"{units.size(m.total)} at most; the framework and the allocator's gaps come on top"),
    ]
    return Section("memory of a rank", rows)


def _holds(o: Outlook) -> str:
    if not is_replicated(get(o.config, "trainer.strategy")):
        return f"{UNKNOWN} for this strategy"
    if o.ranks in (None, 1):
        return "the whole model: weights, gradients and optimizer; every batch"
    return f"a replica of the whole model: weights, gradients and optimizer; 1/{o.ranks} of each batch"
