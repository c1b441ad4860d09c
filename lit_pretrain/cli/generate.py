"""The ``generate`` verb: text from the model in a run folder. The folder is checked before torch is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig

from lit_pretrain.cli import launch, saved
from lit_pretrain.cli.resolvers import resolve
from lit_pretrain.errors import ConfigError

FREE_TEXT = ("prompt", "prompt_file", "run", "checkpoint", "tokenizer", "eos_token")
"""Settings whose value is text as it stands, not Hydra's grammar."""
FORMATS = ("text", "json")


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """A prompt may hold commas, brackets, quotes and ``${``."""
    return saved.free_text(argv, FREE_TEXT)


def job(config: DictConfig) -> None:
    """Print prompts and their continuations."""
    try:
        _generate(config)
    except Exception as e:
        raise launch.Failed from e


def _generate(config: DictConfig) -> None:
    plain = resolve(config)
    saved.one_of("format", plain["format"], FORMATS)
    prompts = find_prompts(plain)
    run_dir = Path(str(plain["run"])).expanduser()
    resolved = saved.read_resolved(run_dir)
    checkpoint = saved.find_checkpoint(run_dir, str(plain["checkpoint"]))
    tokenizer = saved.open_tokenizer(run_dir, plain["tokenizer"], resolved=resolved, eos_token=plain["eos_token"])
    model: Any = saved.load(resolved, checkpoint, device=str(plain["device"]))

    from lit_pretrain.models import generate, stream

    settings = {key: plain[key] for key in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    encoded = [tokenizer.encode(prompt) or [tokenizer.eos_id] for prompt in prompts]
    if len(prompts) == 1 and plain["format"] == "text":
        show(prompts[0], stream(model, encoded[0], eos_id=tokenizer.eos_id, **settings), tokenizer.decode, sys.stdout)
        return
    continuations = generate(model, encoded, eos_id=tokenizer.eos_id, **settings)
    show_all(prompts, [tokenizer.decode(ids) for ids in continuations], sys.stdout, as_json=plain["format"] == "json")


def find_prompts(plain: Mapping[str, Any]) -> list[str]:
    """The prompts of ``prompt``, ``prompts`` or ``prompt_file``; one empty prompt where there is none.

    Raises:
        ConfigError: Two of them are given, the file cannot be read, or there is no prompt in it.
    """
    given = [name for name in ("prompt", "prompts", "prompt_file") if plain[name] is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given; keep one of them.")
    if plain["prompts"] is not None:
        if not isinstance(plain["prompts"], list) or not plain["prompts"]:
            raise ConfigError(f'prompts={plain["prompts"]!r} must be a list of texts: \'prompts=["a", "b"]\'.')
        for number, prompt in enumerate(plain["prompts"]):
            if not isinstance(prompt, str):
                raise ConfigError(
                    f'prompts[{number}]={prompt!r} is no text; put quotes around each: \'prompts=["1", "null"]\'.'
                )
        return list(plain["prompts"])
    if plain["prompt_file"] is not None:
        lines = saved.read_text(Path(str(plain["prompt_file"])).expanduser(), setting="prompt_file").splitlines()
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ConfigError(f"prompt_file={plain['prompt_file']} holds no prompt; write one a line.")
        return prompts
    return [str(plain["prompt"] or "")]


def show(prompt: str, tokens: Iterable[int], decode: Callable[[Sequence[int]], str], out: TextIO) -> None:
    """Write a prompt and its continuation; piece by piece on a terminal, at the end otherwise."""
    live = out.isatty()
    ids: list[int] = []
    out.write(prompt)
    shown = ""
    for token in tokens:
        ids.append(token)
        if live:
            text = decode(ids)
            # Bytes of a character whose rest is still to come decode as U+FFFD: hold them back.
            settled = text.rstrip("\ufffd")
            if settled.startswith(shown):
                out.write(settled[len(shown) :])
                out.flush()
                shown = settled
    text = decode(ids)
    out.write(text[len(shown) :] if text.startswith(shown) else text)
    out.write("\n")
    out.flush()


def show_all(prompts: Sequence[str], continuations: Sequence[str], out: TextIO, *, as_json: bool) -> None:
    """Write several prompts with their continuations: as a JSON list, or as texts with a numbered line above each."""
    pairs = list(zip(prompts, continuations, strict=True))
    if as_json:
        rows = [{"prompt": prompt, "continuation": continuation} for prompt, continuation in pairs]
        out.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    for number, (prompt, continuation) in enumerate(pairs, start=1):
        out.write(f"--- {number} of {len(pairs)}\n{prompt}{continuation}\n")
