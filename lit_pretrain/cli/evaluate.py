"""The ``evaluate`` verb: how well a run's model predicts its held-out text, or any other."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lit_pretrain.cli import derive, launch, saved
from lit_pretrain.cli.resolvers import resolve
from lit_pretrain.cli.table import columns
from lit_pretrain.corpus import EOS_TOKEN, ShardFolders, TokenizerFile, Windows, open_tokens
from lit_pretrain.corpus.baselines import CrossEntropy
from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.memory import precision_word

if TYPE_CHECKING:
    from lit_pretrain.models import GPT

FREE_TEXT = ("run", "text", "checkpoint", "tokenizer", "eos_token")
"""Settings whose value is text as it stands, not Hydra's grammar."""
FORMATS = ("table", "json")


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """A path may be written as it is; a list of files, ``text=[a,b]``, stays Hydra's."""
    return [word if word.startswith("text=[") else saved.free_text([word], FREE_TEXT)[0] for word in argv]


def job(config: DictConfig) -> None:
    """Print loss, perplexity and bits per byte."""
    try:
        plain = resolve(config)
        saved.one_of("format", plain["format"], FORMATS)
        if plain["shards"] is not None and plain["text"] is not None:
            raise ConfigError("shards and text are both given; keep one of them.")
        sys.stdout.write(report(_evaluate(plain), as_json=plain["format"] == "json"))
    except Exception as e:
        raise launch.Failed from e


def _evaluate(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Scores per source and what they are of. Everything that can be checked is checked before torch is loaded."""
    max_tokens = None if plain["max_tokens"] is None else derive.whole("max_tokens", plain["max_tokens"])
    run_dir = Path(str(plain["run"])).expanduser()
    resolved = saved.read_resolved(run_dir)
    checkpoint = saved.find_checkpoint(run_dir, str(plain["checkpoint"]))
    data = resolved.get("data") or {}
    given = plain["batch_size"]
    batch_size = derive.whole("batch_size", (data.get("micro_batch_size") or 8) if given is None else given)
    precision = precision_word(plain["as_precision"] or (resolved.get("trainer") or {}).get("precision", "32-true"))
    of: _HeldOut | _Shards | _Text
    if plain["text"] is not None:
        tokenizer = saved.open_tokenizer(run_dir, plain["tokenizer"], resolved=resolved, eos_token=plain["eos_token"])
        of = _Text(
            plain["text"],
            tokenizer,
            text_key=plain["text_key"],
            stride=plain["stride"],
            max_tokens=max_tokens,
        )
    elif plain["shards"] is not None:
        own = find_own_tokenizer(run_dir, plain["tokenizer"], resolved, eos_token=plain["eos_token"])
        of = _Shards(plain["shards"], own, max_tokens=max_tokens)
    else:
        of = _HeldOut(data, max_tokens=max_tokens)
    model: Any = saved.load(resolved, checkpoint, device=str(plain["device"]))

    from lit_pretrain.instantiate.evaluate import in_precision

    length = min(model.config.block_size, data.get("sequence_length") or model.config.block_size)
    with in_precision(model, precision):
        scores = of.score(model, length=length, batch_size=batch_size)
    if not scores:
        raise ConfigError(f"{of.title} holds nothing to predict; name other text with text=FILE or shards=FOLDER.")
    return {
        "run": str(run_dir),
        "checkpoint": str(checkpoint),
        "precision": precision,
        "of": of.title,
        "scores": scores,
    }


def find_own_tokenizer(
    run_dir: Path, given: object, resolved: Mapping[str, Any], *, eos_token: object
) -> TokenizerFile | None:
    """The tokenizer of a run, the one given instead, or None where the run has none."""
    try:
        return saved.open_tokenizer(run_dir, given, resolved=resolved, eos_token=eos_token)
    except ConfigError:
        if given is not None:
            raise
        return None


class _HeldOut:
    """The validation split of the run's own data, all of it unless it is capped."""

    title = "the run's held-out text"

    def __init__(self, data: Mapping[str, Any], *, max_tokens: int | None) -> None:
        self._data, self._max_tokens = data, max_tokens

    def score(self, model: GPT, *, length: int, batch_size: int) -> dict[str, CrossEntropy]:
        from lit_pretrain.data import TokenDataModule
        from lit_pretrain.instantiate import build
        from lit_pretrain.instantiate.evaluate import held_out_batches, score

        datamodule = build(self._data, "data")
        if not isinstance(datamodule, TokenDataModule):
            raise ConfigError(
                f"data._target_={self._data.get('_target_')} is no TokenDataModule, so evaluate does not know its "
                f"held-out text; name some with text=FILE or shards=FOLDER."
            )
        datamodule.prepare_data()
        datamodule.setup("validate")
        tokenizer = datamodule.tokenizer
        batches = held_out_batches(
            datamodule.validation_windows,
            batch_size=batch_size,
            max_tokens=self._max_tokens,
            isolate_documents=datamodule.isolate_documents,
            padding=0 if tokenizer is None else tokenizer.eos_id,
        )
        sizes = None if tokenizer is None else tokenizer.token_bytes()
        return score(model, batches, names=datamodule.source_names, token_bytes=sizes)


class _Shards:
    """Shard folders, all of each."""

    def __init__(self, data: object, tokenizer: TokenizerFile | None, *, max_tokens: int | None) -> None:
        if isinstance(data, str):
            data = {Path(data).expanduser().name: data}
        if not isinstance(data, Mapping) or not data or not all(isinstance(path, str) for path in data.values()):
            raise ConfigError(f"shards={data!r} must be a shard folder, or several as {{name: folder}}.")
        path, eos = (None, EOS_TOKEN) if tokenizer is None else (tokenizer.path, tokenizer.eos_token)
        self._found = ShardFolders(sources=data, tokenizer=path, eos_token=eos).locate()
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.title = ", ".join(str(path) for path in self._found.train.values())

    def score(self, model: GPT, *, length: int, batch_size: int) -> dict[str, CrossEntropy]:
        from lit_pretrain.instantiate.evaluate import held_out_batches, score

        tokenizer = self._tokenizer
        streams = {name: open_tokens(path) for name, path in self._found.train.items()}
        for stream in streams.values():
            check_vocabulary(model, stream.info.vocab_size, of=str(stream.path))
        windows = [Windows(s, sequence_length=length, keep_partial=True) for s in streams.values()]
        batches = held_out_batches(windows, batch_size=batch_size, max_tokens=self._max_tokens)
        sizes = None if tokenizer is None else tokenizer.token_bytes()
        return score(model, batches, names=list(streams), token_bytes=sizes)


class _Text:
    """Text files in overlapping windows; JSONL and Parquet hold several documents, any other file is one."""

    def __init__(
        self, text: object, tokenizer: TokenizerFile, *, text_key: object, stride: int | None, max_tokens: int | None
    ) -> None:
        from lit_pretrain.cli import texts  # loads pyarrow, which other sources are spared

        paths = [text] if isinstance(text, str) else text
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"text={text!r} must be a file, or several as [a,b].")
        if not isinstance(text_key, str):
            raise ConfigError(f"text_key={text_key!r} must be a text: the key in JSONL, the column in Parquet.")
        self._tokenizer, self._stride = tokenizer, None if stride is None else derive.whole("stride", stride)
        self._documents: list[tuple[str, list[int]]] = []
        titles = []
        for path in paths:
            found = texts.read_texts(path, text_key=text_key)
            if found.left_out:
                print(f"lit-pretrain: text={path}: left out: {found.left_out}.", file=sys.stderr)
            titles.append(f"{path} ({found.about})" if found.about else path)
            encoded = texts.encode(found, tokenizer, path=path, max_tokens=max_tokens)
            self._documents += [(path, ids) for ids in encoded]
        self.title = ", ".join(titles)

    def score(self, model: GPT, *, length: int, batch_size: int) -> dict[str, CrossEntropy]:
        from lit_pretrain.instantiate.evaluate import score, strided_batches

        check_vocabulary(model, self._tokenizer.vocab_size, of=str(self._tokenizer.path))
        stride = self._stride or max(1, length // 2)
        if stride > length:
            raise ConfigError(f"stride={stride} must be at most {length}, the sequence length that the run trained on.")
        batches = strided_batches(
            [ids for _, ids in self._documents],
            length=length,
            stride=stride,
            batch_size=batch_size,
            padding=self._tokenizer.eos_id,
        )
        return score(
            model, batches, names=[path for path, _ in self._documents], token_bytes=self._tokenizer.token_bytes()
        )


def check_vocabulary(model: GPT, vocab_size: int | None, *, of: str) -> None:
    """Refuse ids that a model does not have.

    Raises:
        ConfigError: The ids of ``of`` may be beyond the model's.
    """
    if vocab_size is not None and vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"{of} has ids up to {vocab_size - 1}, the model only up to {model.config.vocab_size - 1}; use the "
            f"tokenizer that it was trained with."
        )


def report(result: Mapping[str, Any], *, as_json: bool) -> str:
    """A table, or strict JSON: numbers that it has no word for become null."""
    from lit_pretrain.instantiate.evaluate import perplexity

    scores: dict[str, CrossEntropy] = dict(result["scores"])
    total, *others = scores.values()
    for other in others:
        total = total + other
    if as_json:

        def entry(score: CrossEntropy) -> dict[str, Any]:
            numbers = {
                "loss": score.nats_per_token,
                "perplexity": perplexity(score),
                "bits_per_byte": score.bits_per_byte,
            }
            finite = {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
            return {"tokens": score.targets, "bytes": score.num_bytes, **finite}

        about = {key: value for key, value in result.items() if key != "scores"}
        about |= {"all": entry(total), "sources": {name: entry(score) for name, score in scores.items()}}
        return json.dumps(about, indent=2, allow_nan=False) + "\n"

    def row(name: str, score: CrossEntropy) -> list[str]:
        bits = score.bits_per_byte
        return [
            name,
            f"{score.targets:,}",
            f"{score.nats_per_token:.4f}",
            f"{perplexity(score):,.2f}",
            "-" if bits is None else f"{bits:.4f}",
        ]

    rows = [row(name, score) for name, score in scores.items()]
    if len(scores) > 1:
        rows.append(row("all", total))
    head = f"{result['checkpoint']} on {result['of']}, precision {result['precision']}\n\n"
    return head + columns(["source", "tokens", "loss (nats/token)", "perplexity", "bits/byte"], rows)
