"""The ``generate`` verb: text from the model in a run folder. The folder is checked before torch is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml
from omegaconf import DictConfig, OmegaConf

from lit_pretrain.cli import launch
from lit_pretrain.corpus import TokenizerFile
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import checkpoints

if TYPE_CHECKING:
    from torch import nn

FREE_TEXT = ("prompt", "run", "checkpoint", "tokenizer")
"""Settings whose value is text as it stands, not Hydra's grammar."""


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """Quote free text, so that a prompt may hold commas, brackets, quotes and ``${``."""
    return [_quoted(word) if word.partition("=")[0] in FREE_TEXT else word for word in argv]


def _quoted(word: str) -> str:
    key, sign, value = word.partition("=")
    if not sign or value == "???" or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return word
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    # Inside quotes only backslashes before a quote are special.
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    value = re.sub(r"(\\+)$", r"\1\1", value)
    return f"{key}='{value}'"


def job(config: DictConfig) -> None:
    """Print a prompt and its continuation."""
    try:
        _generate(config)
    except BrokenPipeError:  # the reader (head, a closed pager) has enough
        sys.stderr.close()
    except Exception as e:
        raise launch.Failed from e


def _generate(config: DictConfig) -> None:
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    run_dir = Path(str(plain["run"])).expanduser()
    resolved = read_resolved(run_dir)
    checkpoint = find_checkpoint(run_dir, str(plain["checkpoint"]))
    tokenizer = TokenizerFile(find_tokenizer(run_dir, plain["tokenizer"]))
    model = load(resolved, checkpoint, device=str(plain["device"]))

    from lit_pretrain.models import stream

    prompt = str(plain["prompt"] if plain["prompt"] is not None else "")
    tokens = stream(
        model,  # type: ignore[arg-type]
        tokenizer.encode(prompt) or [tokenizer.eos_id],
        max_new_tokens=plain["max_new_tokens"],
        temperature=plain["temperature"],
        top_k=plain["top_k"],
        top_p=plain["top_p"],
        seed=plain["seed"],
        eos_id=tokenizer.eos_id,
    )
    show(prompt, tokens, tokenizer.decode, sys.stdout)


def read_resolved(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration of a run folder.

    Raises:
        ConfigError: There is no such run.
    """
    path = run_dir / launch.RESOLVED
    if not run_dir.is_dir():
        raise ConfigError(f"run={run_dir} does not exist; name the folder of a run, such as outputs/RUN.")
    if not path.is_file():
        inside = sorted(p.parent for p in run_dir.glob(f"*/{launch.RESOLVED}"))
        hint = f"did you mean run={inside[-1]}?" if inside else "name the folder that a training run printed."
        raise ConfigError(f"run={run_dir} is not a run folder (no {launch.RESOLVED}); {hint}")
    try:
        resolved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is damaged: {' '.join(str(e).split())}.") from e
    if not isinstance(resolved, dict) or "module" not in resolved:
        raise ConfigError(f"{path} is not the configuration of a training run: it has no module.")
    return resolved


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """A checkpoint of a run.

    Args:
        run_dir: The run folder.
        which: ``newest``, a file name in the run's checkpoints, or a path.

    Raises:
        ConfigError: There is none.
    """
    folder = run_dir / checkpoints.FOLDER
    found = checkpoints.listed(folder)
    if which == "newest":
        if not found:
            raise ConfigError(f"{folder} holds no checkpoint; the run saved none, or name a file with checkpoint=FILE.")
        return found[-1]
    for path in (Path(which).expanduser(), folder / which):
        if path.is_file():
            return path
    names = ", ".join(p.name for p in found) or "none"
    raise ConfigError(f"checkpoint={which} is neither newest nor a file; in {folder} there is: {names}.")


def find_tokenizer(run_dir: Path, given: object) -> Path:
    """The tokenizer of a run, or the one given instead.

    Raises:
        ConfigError: There is none.
    """
    path = run_dir / "tokenizer.json" if given is None else Path(str(given)).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no tokenizer at {path}; name a tokenizer.json with tokenizer=FILE.")
    return path


def load(resolved: Mapping[str, Any], checkpoint: Path, *, device: str) -> nn.Module:
    """The trained model, in evaluation mode.

    Args:
        resolved: The run's configuration.
        checkpoint: A file that Lightning wrote; read as tensors and plain data only.
        device: ``auto``, or a device as torch names it.

    Raises:
        ConfigError: The checkpoint is damaged, does not fit, or there is no such device.
    """
    import pickle

    import torch

    from lit_pretrain.instantiate import build

    where = _device(device)
    module = build(resolved["module"], "module")
    model = getattr(module, "model", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "logits"):
        raise ConfigError(f"module._target_={resolved['module'].get('_target_')} holds no GPT; generate cannot use it.")
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        weights = saved["state_dict"]
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as e:
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__).strip().rstrip(".")
        raise ConfigError(f"{checkpoint} cannot be read as a checkpoint ({reason}); choose another.") from e
    try:
        module.load_state_dict(weights)
    except RuntimeError as e:
        reason = " ".join(str(e).split())
        raise ConfigError(f"{checkpoint} does not fit the model of this run: {reason[:300]}") from e
    return model.to(where).eval()


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise ConfigError(f"device={name} cannot be used here ({reason}); use auto or cpu.") from e
    return where


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
