"""Hydra's and OmegaConf's errors as one sentence with the nearest key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lit_pretrain.cli import flags
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.nearest import nearest

CONFIGS = "lit_pretrain.conf"
EXAMPLES = {
    "data.corpus.sources": "'data.corpus.sources={web: FOLDER}'; lit-pretrain prepare makes such a folder of your own "
    "text and prints the words to train on it.",
    "input": "input=..., a folder, files (.txt, .jsonl, .parquet), globs or hf://NAME.",
    "output": "output=..., a folder for the shards.",
}
"""What to write for a setting that has no default, where ``...`` says too little."""


def explain(error: BaseException, verb: str, argv: Sequence[str]) -> str:
    """What the user should change, in one sentence.

    Args:
        error: What Hydra or OmegaConf raised.
        verb: The primary configuration.
        argv: Flags and overrides, to look names up in the configuration that they choose.
    """
    chain = list(_chain(error))
    for e in chain:
        if isinstance(e, ConfigError):
            return str(e)
    for e in chain:
        if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark is not None:
            return f"{e.problem_mark.name}, line {e.problem_mark.line + 1}: not valid YAML ({e.problem})."
    text = "\n".join(str(e) for e in chain)
    try:
        sentence = _override(text, verb, argv) or _option(text) or _value(chain, text, argv)
    except Exception:  # a hint must never hide the error
        sentence = None
    first_line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return sentence or " ".join(first_line.split())


def knows(e: BaseException) -> bool:
    """Whether :func:`explain` has something to say: a mistake in a configuration or on the command line."""
    if isinstance(e, (HydraException, OmegaConfBaseException, yaml.YAMLError)):
        return True
    return isinstance(e, ValueError) and str(e).startswith("Config group override must be")  # a plain one, by Hydra


def _chain(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__ or e.__context__


def _override(text: str, verb: str, argv: Sequence[str]) -> str | None:
    """Overrides that name a key which is not there, or is there already."""
    m = re.search(r"Could not override '([^']+)'", text)
    if m:
        return _no_such_key(m.group(1), verb, argv)
    m = re.search(r"Could not delete from config\. '?([\w./@-]+)'? does not exist", text) or re.search(
        r"Could not delete\. '?([\w./@-]+)'?", text
    )
    if m:
        return _no_such_key(m.group(1), verb, argv)
    m = re.search(r"An item is already at '([^']+)'", text)
    if m:
        return f"{m.group(1)} exists already; write {m.group(1)}=... without the +."
    m = re.search(r"Multiple values for ([\w/@]+)", text)
    if m:
        return f"{m.group(1)} is chosen twice; name one option."
    return None


def _no_such_key(key: str, verb: str, argv: Sequence[str]) -> str:
    key = key.replace("/", ".").partition("@")[0]
    config = _composed(verb, argv)
    node: object = config
    found: list[str] = []
    leaf = key
    for leaf in key.split("."):
        if not isinstance(node, DictConfig) or leaf not in set(map(str, node)):  # `in` denies what is ???
            break
        found.append(leaf)
        node = OmegaConf.select(config, ".".join(found))
    if len(found) == key.count(".") + 1:  # it is there: the value is a mapping with other names than it has
        value = next((a.partition("=")[2] for a in reversed(argv) if a.startswith(f"{key}=")), "{...}")
        return (
            f"{key} has names already, and a mapping changes only those; to replace it write '~{key}' "
            f"'+{key}={value}', to add to it +{key}.NAME=...."
        )
    where = ".".join(found) or verb
    if not found and "." not in key and (full := _ending_in(key, config)):
        return f"{key} is not a setting of {where}; did you mean {' or '.join(repr(one) for one in full)}?"
    known = {str(k) for k in node} if isinstance(node, DictConfig) else set()
    if not found:
        known |= _groups(argv)
    return f"{'.'.join([*found, leaf])} is not a setting of {where}; {nearest(leaf, known)}"


def _ending_in(leaf: str, config: DictConfig, *, most: int = 3) -> list[str]:
    """Settings whose last word is ``leaf``, such as optimizer.lr; none where there are too many to choose from."""
    found: list[str] = []
    inner: list[tuple[str, object]] = [("", OmegaConf.to_container(config, resolve=False))]
    while inner:
        where, node = inner.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                full = f"{where}.{name}" if where else str(name)
                if name == leaf and where:
                    found.append(full)
                inner.append((full, value))
    return sorted(found) if len(found) <= most else []


def _option(text: str) -> str | None:
    m = re.search(r"Could not load '([\w/]+)/(\w+)'", text)
    if m:
        return f"{m.group(1)}={m.group(2)} does not exist; a group takes the name of one option."
    m = re.search(r"Could not find '([^']+)'", text)
    if not m:
        return None
    group, _, name = m.group(1).rpartition("/")
    listing = text.split("Available options", 1)[-1].split("Config search path")[0]
    options = re.findall(r"^\s+(\S+)$", listing, re.MULTILINE)
    if not group:
        return f"there is no configuration {name!r}; {nearest(name, options)}"
    return f"{group}={name} does not exist; {nearest(name, options)}"


def _value(chain: Sequence[BaseException], text: str, argv: Sequence[str]) -> str | None:
    for e in chain:
        key = getattr(e, "full_key", None)
        if isinstance(e, MissingMandatoryValue) and key:
            return _wanted(key)
        if isinstance(e, InterpolationToMissingValueError):
            wanted = re.search(r"Missing mandatory value: ([\w.]+)", str(e))
            if wanted:
                return _wanted(wanted.group(1))
        if isinstance(e, InterpolationKeyError) and key:
            wanted = re.search(r"key '([^']+)' not found", str(e))
            return f"{key} follows from {wanted.group(1) if wanted else 'another setting'}, which is not there."
    if "mismatched input '='" in text:
        bad = next((a for a in flags.overrides(argv) if a.count("=") > 1), "")
        key, _, value = bad.partition("=")
        return f"{bad}: a value with '=' in it needs quotes inside quotes: '{key}=\"{value}\"'."
    m = re.search(r"node `([\w.]+)` is not a container", text)
    if m:
        return f"{m.group(1)} is a group of settings, not one value; set {m.group(1)}.NAME=..., one by one."
    m = re.search(r"Config group override must be a string or a list", text)
    if m:
        groups = _groups(argv)
        bad = next((a for a in argv if a.partition("=")[0] in groups and a.partition("=")[2] in ("null", "")), "")
        return f"{bad}: a group needs an option; name one, or remove the setting with ~{bad.partition('=')[0]}."
    broken = next((e for e in chain if isinstance(e, OverrideParseException)), None)
    if broken is not None:
        return (
            f"{broken.override}: the value cannot be read; lists are [a,b], mappings {{a: 1}}, and text with "
            f"commas, brackets or '=' needs quotes inside quotes, as in 'name=\"a, b\"'."
        )
    m = re.search(r"Error merging override (.+)", text)
    if m:
        reasons = (line for e in chain for line in str(e).splitlines() if line.strip() and m.group(0) not in line)
        reason = next(reasons, "a value of that kind is not possible")
        return f"{m.group(1)} cannot be set: {' '.join(reason.split()).rstrip('.')}."
    m = re.search(r"Ambiguous value for argument '([^']+)'", text)
    if m:
        return f"{m.group(1)}: several values make a sweep, which needs -m; a list is written [a,b]."
    return None


def _wanted(key: str) -> str:
    return f"{key} must be given: {EXAMPLES.get(key, f'{key}=...')}"


def _composed(verb: str, argv: Sequence[str]) -> DictConfig:
    """The verb's configuration with those group choices of ``argv`` that compose, to look names up in."""
    groups = _groups(argv)
    chosen = [a for a in flags.overrides(argv) if a.partition("=")[0] in groups and "," not in a]
    extra = flags.value_of(argv, "--config-dir", "-cd")
    if extra is not None:
        chosen.append(f"hydra.searchpath=[file://{Path(extra).absolute()}]")
    with initialize_config_module(CONFIGS, version_base="1.3"):
        try:
            return compose(verb, chosen, return_hydra_config=True)
        except Exception:
            return compose(verb, return_hydra_config=True)


def _groups(argv: Sequence[str]) -> set[str]:
    """Names of configuration groups: ours, and those in the user's folder."""
    extra = flags.value_of(argv, "--config-dir", "-cd")
    places = [files(CONFIGS), *([Path(extra)] if extra is not None and Path(extra).is_dir() else [])]
    return {p.name for place in places for p in place.iterdir() if p.is_dir() and not p.name.startswith("_")}
