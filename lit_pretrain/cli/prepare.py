"""The ``prepare`` verb: the user's own text as shards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lit_pretrain.cli import launch, saved
from lit_pretrain.cli.resolvers import resolve
from lit_pretrain.corpus import EOS_TOKEN
from lit_pretrain.corpus.holdout import FEW_TOKENS
from lit_pretrain.corpus.journal import describe_skipped
from lit_pretrain.corpus.prepare import Prepared, PrepareSettings, prepare
from lit_pretrain.corpus.sources import Reading
from lit_pretrain.errors import ConfigError
from lit_pretrain.units import count, duration, size

FREE_TEXT = ("input", "output", "tokenizer", "tokenizer_pattern", "eos_token", "separator")
"""Settings whose value is text as it stands, not Hydra's grammar."""
READING = ("documents", "separator", "text_key", "max_document_bytes", "dataset_config", "dataset_split")
_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\f": "\f"}


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """Paths may be written as they are, several with commas between; ``input=[a, b]`` and ``null`` stay Hydra's."""
    return [
        word
        if word.partition("=")[2].startswith("[") or word.endswith("=null")
        else saved.free_text([word], FREE_TEXT)[0]
        for word in argv
    ]


def job(config: DictConfig) -> None:
    """Prepare, then say what came of it and how to train on it."""
    try:
        print(*summary(prepare(settings_of(resolve(config)))), sep="\n")
    except Exception as e:
        raise launch.Failed from e


def settings_of(plain: Mapping[str, Any]) -> PrepareSettings:
    """The settings of a preparation, out of the verb's configuration.

    Raises:
        ConfigError: A setting is impossible.
    """
    given = plain["input"]
    inputs = given.split(",") if isinstance(given, str) else given
    if not isinstance(inputs, list) or not all(isinstance(path, str) and path.strip() for path in inputs):
        raise ConfigError(f"input={given!r} must be a path, or several with commas between.")
    if plain["output"] is None or plain["tokenizer"] is None:
        key = "output" if plain["output"] is None else "tokenizer"
        use = "a folder for the shards" if key == "output" else "train, or a tokenizer to use"
        raise ConfigError(f"{key}=null must be {use}.")
    if "://" in str(plain["output"]):
        raise ConfigError(f"output={plain['output']} must be a folder on this machine; copy the shards from there.")
    others = {key: value for key, value in plain.items() if key not in (*READING, "input", "output", "format")}
    for key in ("tokenizer", "tokenizer_pattern", "eos_token", "separator", "text_key"):
        if plain[key] is not None and not isinstance(plain[key], str):
            raise ConfigError(f"{key}={plain[key]!r} must be a text.")
    reading = {key: plain[key] for key in READING}
    if reading["separator"] is not None:
        reading["separator"] = re.sub(r"\\[nrtf]", lambda found: _ESCAPES[found.group()], reading["separator"])
    return PrepareSettings(
        input=[path.strip() for path in inputs],
        output=Path(str(plain["output"])),
        format=None if plain["format"] == "auto" else plain["format"],
        reading=Reading(**reading),
        **others,
    )


def summary(done: Prepared) -> list[str]:
    """What there is now, and how to train on it."""
    lines = []
    record = done.record
    if not done.fresh:
        lines.append(f"{done.folder} was prepared before, of this input and with these settings: nothing to do.")
    for split, numbers in record["splits"].items():
        per_byte = numbers["tokens"] / numbers["bytes"]
        lines.append(
            f"{split}: {count(numbers['documents'])} documents, {size(numbers['bytes'])}, {count(numbers['tokens'])} "
            f"tokens ({per_byte:.3f} per byte) in {numbers['shards']} shards"
        )
    if "validation" not in record["splits"]:
        lines.append("validation: none; no document was held out")
    lines += _doubts(record["splits"].get("validation"))
    used = sum(numbers["documents"] for numbers in record["splits"].values())
    skipped = sum(what["documents"] for what in record["skipped"].values())
    if skipped:
        share = "" if skipped < used else ", MORE THAN WAS USED"
        lines.append(f"left out: {count(skipped)} documents{share}: {describe_skipped(record['skipped'])}")
    if done.encoded_bytes and done.seconds > 0:
        speed = done.encoded_bytes / 1e6 / done.seconds
        lines.append(f"encoded {size(done.encoded_bytes)} of text in {duration(done.seconds)}: {speed:.1f} MB/s")
    lines.append("duplicates were not looked for")
    words = " ".join(_for_shell(word) for word in overrides(done))
    return [*lines, "train on it with:", f"  lit-pretrain train {words} length.epochs=1"]


def _doubts(held_out: Mapping[str, Any] | None) -> list[str]:
    """A sentence where the held-out text is too little to judge a model by."""
    if held_out is None or (held_out["documents"] > 1 and held_out["tokens"] >= FEW_TOKENS):
        return []
    number = "1 document" if held_out["documents"] == 1 else f"{held_out['documents']} documents"
    return [
        f"validation is SMALL: {number}, {count(held_out['tokens'])} tokens; its loss says little: hold out more with "
        f"validation_fraction=0.1 and another output"
    ]


def overrides(done: Prepared) -> list[str]:
    """The words that make ``lit-pretrain train`` use the shards."""
    folder, tokenizer = done.folder, done.record["tokenizer"]
    name = re.sub(r"\W", "_", folder.absolute().name)
    if not name[:1].isalpha() or name.lower() in ("null", "true", "false", "nan", "inf"):  # not words to Hydra
        name = f"source_{name}"
    words = ["data=shards", f"data.corpus.sources={{{name}: {_quoted(folder / 'train')}}}"]
    if "validation" in done.record["splits"]:
        words.append(f"data.corpus.validation={{{name}: {_quoted(folder / 'validation')}}}")
    words.append(f"data.corpus.tokenizer={_quoted(folder / 'tokenizer.json')}")
    if tokenizer["eos_token"] != EOS_TOKEN:
        words.append(f"data.corpus.eos_token={_quoted(tokenizer['eos_token'])}")
    return [*words, f"model.vocab_size={tokenizer['vocab_size']}"]


def _quoted(value: Path | str) -> str:
    """A text in Hydra's grammar."""
    text = str(value)
    return text if re.fullmatch(r"[\w./-]*[A-Za-z/][\w./-]*", text) else saved.free_text([f"x={text}"], ["x"])[0][2:]


def _for_shell(word: str) -> str:
    """A word as one would type it."""
    name, _, value = word.partition("=")
    readable = " " in value and not re.search(r"[\"$`\\!]", value)
    return f'{name}="{value}"' if readable else shlex.quote(word)
