"""What a training run would be, from its configuration alone: no torch, no Lightning, nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lit_pretrain.cli import derive
from lit_pretrain.cli.checks import is_light
from lit_pretrain.cli.numbers import ADAM, rates
from lit_pretrain.corpus import ShardFolders, TokenizerFile, Windows, open_tokens
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.instantiate import build
from lit_pretrain.planning import MemoryPerRank, ParameterCount, count_parameters, flops_per_token, memory_per_rank
from lit_pretrain.planning.memory import NUMBER_FORMATS, precision_word
from lit_pretrain.planning.rates import RatePlan
from lit_pretrain.specs import CorpusProvider, GPTConfig


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """A corpus that is ready to read.

    Args:
        tokens: Training tokens per source.
        windows: Training windows over all sources.
        held_out: Held-out tokens over all sources.
        vocab_size: What the ids need; None when nobody says.
    """

    tokens: Mapping[str, int]
    windows: int
    held_out: int
    vocab_size: int | None

    @property
    def total(self) -> int:
        """Training tokens over all sources."""
        return sum(self.tokens.values())


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The figures of a run; None where a setting that they need is wrong or nobody knows.

    Args:
        config: The resolved configuration, without what could not be resolved.
        architecture: The GPT.
        parameters: Of the GPT.
        ranks: Processes over all nodes.
        updates: Optimizer updates.
        tokens_per_update: Over all ranks.
        corpus: What there is to read.
        corpus_unknown: Why ``corpus`` is None.
        rates: The learning-rate schedule.
        memory: Of one rank.
        memory_unknown: Why ``memory`` is None.
        errors: Settings that the rooms below refuse, each as a sentence.
    """

    config: Mapping[str, Any]
    architecture: GPTConfig | None
    parameters: ParameterCount | None
    ranks: int | None
    updates: int | None
    tokens_per_update: int | None
    corpus: CorpusFacts | None
    corpus_unknown: str
    rates: RatePlan | None
    memory: MemoryPerRank | None
    memory_unknown: str
    errors: tuple[str, ...]

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run."""
        if self.updates is None or self.tokens_per_update is None:
            return None
        return self.updates * self.tokens_per_update

    @property
    def flops_per_token(self) -> float | None:
        """Of forward and backward, at the length that is trained."""
        length = whole(get(self.config, "batch.sequence_length"))
        if self.architecture is None or length is None:
            return None
        return flops_per_token(self.architecture, length)


def get(config: Any, path: str, default: Any = None) -> Any:
    """The setting at a dotted path, or ``default`` when there is none on the way."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return default
        config = config[key]
    return config


def look(config: Mapping[str, Any]) -> Outlook:
    """Work out what there is to know.

    Args:
        config: Plain containers; keys that could not be resolved may be missing.
    """
    errors: list[str] = []
    architecture = _architecture(config, errors)
    corpus, unknown = _corpus(config, errors)
    tokens_per_update = whole(get(config, "batch.tokens_per_update"))
    updates = _updates(config, corpus)
    course = _rates(config, updates, tokens_per_update, errors)
    memory, memory_unknown = _memory(config, architecture)
    processes, nodes = whole(get(config, "run.num_processes")), whole(get(config, "trainer.num_nodes", 1))
    return Outlook(
        config=config,
        architecture=architecture,
        parameters=None if architecture is None else count_parameters(architecture),
        ranks=None if processes is None or nodes is None else processes * nodes,
        updates=updates,
        tokens_per_update=tokens_per_update,
        corpus=corpus,
        corpus_unknown=unknown,
        rates=course,
        memory=memory,
        memory_unknown=memory_unknown,
        errors=tuple(dict.fromkeys(errors)),
    )


def whole(value: object) -> int | None:
    """A whole number above 0, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _architecture(config: Mapping[str, Any], errors: list[str]) -> GPTConfig | None:
    built = _built(config.get("model"), "model", errors)
    return built if isinstance(built, GPTConfig) else None


def _built(node: object, where: str, errors: list[str]) -> Any:
    """The object of a node whose class needs no torch; None for others, and where it cannot be made."""
    if not is_light(node):
        return None
    try:
        return build(node, where)
    except ConfigError as e:
        errors.append(str(e))
    except Exception as e:  # a value of a kind that the constructor does not expect
        errors.append(f"{where} cannot be made of these settings ({type(e).__name__}: {e}).")
    return None


def _corpus(config: Mapping[str, Any], errors: list[str]) -> tuple[CorpusFacts | None, str]:
    node, length = get(config, "data.corpus"), whole(get(config, "batch.sequence_length"))
    if not is_light(node) or length is None:
        return None, "not known: data.corpus is a class of your own" if length and node else "not known"
    provider = _built(node, "data.corpus", errors)
    if not isinstance(provider, CorpusProvider):
        return None, "not known"
    try:
        found = provider.locate()
        vocab_size, eos_id = found.vocab_size, found.eos_id
        if found.tokenizer is not None:
            tokenizer = TokenizerFile(found.tokenizer, eos_token=found.eos_token)
            vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
        opened = partial(open_tokens, dtype=found.dtype, vocab_size=vocab_size, eos_id=eos_id)
        train = {name: opened(path) for name, path in found.train.items()}
        held_out = [opened(path) for path in found.validation.values()]
        windows = [Windows(stream, sequence_length=length) for stream in train.values()]
    except DataError as e:
        if isinstance(provider, ShardFolders):
            errors.append(str(e))
            return None, "not known"
        return None, "not known until the corpus is made, when a run first uses it"
    return CorpusFacts(
        tokens={name: stream.num_tokens for name, stream in train.items()},
        windows=sum(len(w) for w in windows),
        held_out=sum(stream.num_tokens for stream in held_out),
        vocab_size=vocab_size or next(iter(train.values())).info.vocab_size,
    ), ""


def _updates(config: Mapping[str, Any], corpus: CorpusFacts | None) -> int | None:
    steps = whole(get(config, "trainer.max_steps"))
    if steps is not None:
        return steps
    epochs, batch = whole(get(config, "trainer.max_epochs")), whole(get(config, "batch.global_batch_size"))
    if epochs is None or batch is None or corpus is None:
        return None
    return epochs * max(1, corpus.windows // batch)  # as TokenDataModule.updates_per_epoch


def _rates(
    config: Mapping[str, Any], updates: int | None, tokens_per_update: int | None, errors: list[str]
) -> RatePlan | None:
    peak = get(config, "optimizer.lr")
    try:
        return rates(config.get("schedule"), updates=updates, tokens_per_update=tokens_per_update, peak=peak)
    except ConfigError as e:
        errors.append(str(e))
        return None


def is_replicated(strategy: object) -> bool:
    """Whether every rank holds the whole model."""
    if isinstance(strategy, str):
        return strategy in ("auto", "ddp") or strategy.startswith("ddp_")
    target = str(get(strategy, "_target_", ""))
    return target.startswith("lightning.") and target.rpartition(".")[2] in ("DDPStrategy", "SingleDeviceStrategy")


def _memory(config: Mapping[str, Any], architecture: GPTConfig | None) -> tuple[MemoryPerRank | None, str]:
    precision = precision_word(get(config, "trainer.precision"))
    if architecture is None:
        return None, "not known" + ("" if is_light(config.get("model")) else ": the model is a class of your own")
    if not is_replicated(get(config, "trainer.strategy")):
        return None, "not known for this strategy"
    if precision not in NUMBER_FORMATS:
        return None, f"not known for trainer.precision={precision}"
    micro, length = whole(get(config, "batch.micro_batch_size")), whole(get(config, "batch.sequence_length"))
    if micro is None or length is None:
        return None, "not known"
    mode = get(config, "module.activation_checkpointing", "none")
    if mode not in ("none", "selective", "full"):
        return None, f"not known for module.activation_checkpointing={mode}"
    ranks = (whole(get(config, "run.num_processes")) or 1) * (whole(get(config, "trainer.num_nodes", 1)) or 1)
    is_one = get(config, "trainer.strategy.gradient_as_bucket_view") is True
    return memory_per_rank(
        architecture,
        tokens=micro * length,
        precision=precision,
        activation_checkpointing=mode,
        moments=2 if has_adam(config) else 0,
        gradient_copies=1 if ranks > 1 and not is_one else 0,
    ), ""


def has_adam(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer keeps two moments per parameter."""
    return get(config, "optimizer._target_") in ADAM


def on_gpu(config: Mapping[str, Any]) -> bool:
    """Whether the run would use GPUs of this machine, or asks for them."""
    accelerator = get(config, "trainer.accelerator", "auto")
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and derive.visible_gpus() > 0)
