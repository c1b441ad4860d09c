"""What a run left in its folder, for the verbs that read one. The folder is checked before torch is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_pretrain.cli import launch
from lit_pretrain.cli.checks import is_light
from lit_pretrain.corpus import EOS_TOKEN, TokenizerFile
from lit_pretrain.distributed.checkpoint import catalog
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import build, checkpoints
from lit_pretrain.specs import PreparedCorpus

if TYPE_CHECKING:
    import torch
    from torch import nn

MODEL = "model."
"""How names of weights begin in a checkpoint folder."""


def free_text(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Quote the values of some settings, so that they may hold commas, brackets, quotes and ``${``.

    Args:
        argv: Words of a command line.
        names: Settings whose value is text as it stands, not Hydra's grammar.
    """
    return [_quoted(word) if word.partition("=")[0] in names else word for word in argv]


def _quoted(word: str) -> str:
    key, sign, value = word.partition("=")
    if not sign or value == "???" or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return word
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    # Inside quotes only backslashes before a quote are special.
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    value = re.sub(r"(\\+)$", r"\1\1", value)
    return f"{key}='{value}'"


def one_of(setting: str, value: object, known: Sequence[str]) -> None:
    """Raises ConfigError unless ``value`` is among ``known``."""
    if value not in known:
        raise ConfigError(f"{setting}={value} is unknown; use {' or '.join(known)}.")


def read_text(path: Path, *, setting: str) -> str:
    """A text file of the user's.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{setting}={path} cannot be read ({e.strerror}); name a text file.") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{setting}={path} is not UTF-8 text (byte {e.start}); convert it first.") from e


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
        which: ``newest``, ``best`` (by the metric that the run watched), a name in the run's checkpoints, or a path.

    Raises:
        ConfigError: There is none.
    """
    folder = run_dir / checkpoints.FOLDER
    if which == "newest":
        return _newest(folder)
    if which == "best":
        return _best(folder)
    for path in (Path(which).expanduser(), folder / which):
        if path.is_file() or catalog.is_checkpoint(path):
            return path
    names = ", ".join(one.path.name for one in checkpoints.listed(folder)) or "none"
    raise ConfigError(f"checkpoint={which} is neither newest, best nor a checkpoint; in {folder} there is: {names}.")


def _newest(folder: Path) -> Path:
    def say(sentence: str) -> None:
        print(f"lit-pretrain: {sentence}", file=sys.stderr)

    found = checkpoints.newest(folder, say=say)
    if found is not None:
        return found.path
    if checkpoints.listed(folder):
        raise ConfigError(f"no checkpoint in {folder} can be read; name another with checkpoint=FILE.")
    raise ConfigError(f"{folder} holds no checkpoint; the run saved none, or name one with checkpoint=FILE.")


def _best(folder: Path) -> Path:
    """The best checkpoint by the watched metric, as the newest one that can be read remembers it."""
    callbacks = read_checkpoint(_newest(folder)).get("callbacks") or {}
    states = [state for key, state in callbacks.items() if "Checkpoint" in str(key) and isinstance(state, Mapping)]
    watched = [
        state for state in states if state.get("monitor") and (state.get("best_model_path") or state.get("best"))
    ]
    if not watched:
        raise ConfigError(
            "checkpoint=best needs a metric that the run watched, and it watched none; train with "
            "callbacks.checkpoint.monitor=val/loss, or use checkpoint=newest."
        )
    # The name only: the run folder may have moved.
    path = folder / Path(watched[0].get("best_model_path") or watched[0]["best"]).name
    if not path.exists():
        raise ConfigError(f"checkpoint=best was {path}, which is gone; use checkpoint=newest or name a file.")
    return path


def open_tokenizer(
    run_dir: Path, given: object, *, resolved: Mapping[str, Any], eos_token: object = None
) -> TokenizerFile:
    """The tokenizer of a run, or the one given instead, with the token that ends a document in the run's data.

    Args:
        run_dir: The run folder.
        given: A file, or None for the run's own.
        resolved: The run's configuration.
        eos_token: Instead of the run's; for a tokenizer that is not the run's own.

    Raises:
        ConfigError: There is no tokenizer.
        DataError: It is damaged, or has no such token.
    """
    path = find_tokenizer(run_dir, given, resolved=resolved)
    corpus = (resolved.get("data") or {}).get("corpus")
    own = corpus.get("eos_token") if isinstance(corpus, Mapping) else None
    return TokenizerFile(path, eos_token=str(eos_token or own or EOS_TOKEN))


def find_tokenizer(run_dir: Path, given: object, *, resolved: Mapping[str, Any]) -> Path:
    """The tokenizer of a run, or the one given instead.

    A run copies it into its folder when it starts; where that is missing, it may still be where the data is.

    Args:
        run_dir: The run folder.
        given: A file, or None for the run's own.
        resolved: The run's configuration.

    Raises:
        ConfigError: There is none.
    """
    path = run_dir / "tokenizer.json" if given is None else Path(str(given)).expanduser()
    if path.is_file():
        return path
    of_data = _tokenizer_of_data(resolved) if given is None else None
    if of_data is None:
        raise ConfigError(f"there is no tokenizer at {path}; name a tokenizer.json with tokenizer=FILE.")
    return of_data


def _tokenizer_of_data(resolved: Mapping[str, Any]) -> Path | None:
    node = (resolved.get("data") or {}).get("corpus")
    if not is_light(node):
        return None
    try:
        found: PreparedCorpus = build(node, "data.corpus").locate()
    except Exception:  # the data has gone or changed: then there is no tokenizer there, which is all that is asked
        return None
    return found.tokenizer


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, read as tensors and plain data only.

    Raises:
        ConfigError: It is damaged, or no checkpoint.
    """
    from lit_pretrain.plugins import FolderCheckpointIO

    return FolderCheckpointIO(background=False).load_checkpoint(path, weights_only=True)


def read_weights(path: Path) -> Mapping[str, Any]:
    """The weights of a checkpoint by name, of a folder without reading the rest.

    Raises:
        ConfigError: As :func:`read_checkpoint`; there are none.
    """
    if path.is_dir():
        from lit_pretrain.distributed.checkpoint import read_checkpoint as read

        _, tensors = read(path, keys=lambda name: name.startswith(MODEL))
        return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
    weights = read_checkpoint(path).get("state_dict")
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{path} cannot be read as a checkpoint (it holds no state_dict); choose another.")
    return weights


def load(resolved: Mapping[str, Any], checkpoint: Path, *, device: str) -> nn.Module:
    """The trained model, in evaluation mode.

    Args:
        resolved: The run's configuration.
        checkpoint: A folder, or a file that Lightning wrote; read as tensors and plain data only.
        device: ``auto``, or a device as torch names it.

    Raises:
        ConfigError: The checkpoint is damaged, does not fit, or there is no such device.
    """
    import torch

    where = find_device(device)
    module = build(resolved["module"], "module")
    model = getattr(module, "model", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "logits"):
        raise ConfigError(
            f"module._target_={resolved['module'].get('_target_')} holds no GPT; only training can use it."
        )
    weights = read_weights(checkpoint)
    try:
        module.load_state_dict(weights)
    except RuntimeError as e:
        reason = " ".join(str(e).split())
        raise ConfigError(f"{checkpoint} does not fit the model of this run: {reason[:300]}") from e
    return model.to(where).eval()


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU where there is one.

    Raises:
        ConfigError: It cannot be used here.
    """
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
