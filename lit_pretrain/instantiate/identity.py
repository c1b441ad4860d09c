"""What a run may not change silently when it goes on: the settings that decide what is learnt. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_pretrain.errors import ConfigError

DECISIVE = (
    "optimizer",
    "schedule",
    "batch.sequence_length",
    "batch.global_batch_size",
    "seed",
    "trainer.precision",
    "model",
    "callbacks.clipping",
    "data",
    "module",
)
"""Settings and groups of them, in the order in which a difference is looked for: a value that is handed on to a later
one differs there too, and is named once."""
FREE = (
    "data.weights",  # what was read stays as it was: the data plan itself sees to that
    "data.skip",
    "data.micro_batch_size",
    "data.max_validation_tokens",
    "data.prefetch",
    "data.corpus.cache_dir",
    "module.activation_checkpointing",
    "module.compile",
)
"""Parts of them that may change: they decide the speed, or the future only."""
KEY = "lit_pretrain_run"
"""In a checkpoint: ``config``, the resolved configuration, and ``tokenizer``, the hash of its content or None."""
LENGTH = "length"
NAMED = 6
"""Differences that a message names."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that a run began with, and what it would go on with.

    Args:
        key: Its dotted path.
        old: None where there was none.
        new: None where there is none.
    """

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} was {_short(self.old)}, is {_short(self.new)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Every decisive setting that differs. A longer run is no difference, a shorter one is.

    Args:
        old: The resolved configuration that a checkpoint was made with.
        new: The one to go on with.
    """
    return _differing(old, new, DECISIVE, free=FREE) + _shorter(old, new)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Every setting that differs, decisive or not; a value that is handed on is named once."""
    first = list(dict.fromkeys(key.partition(".")[0] for key in DECISIVE))
    keys = [key for key in first if key in old or key in new]
    return _differing(old, new, dict.fromkeys([*keys, *old, *new]), free=())


def _differing(
    old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str], *, free: Sequence[str]
) -> list[Difference]:
    found: list[Difference] = []
    named: set[tuple[str, str, str]] = set()
    for key in keys:
        before, after = (dict(_leaves(key, _get(config, key))) for config in (old, new))
        for path in dict.fromkeys([*before, *after]):
            one = Difference(key=path, old=before.get(path), new=after.get(path))
            if one.old == one.new or any(_is_within(path, other) for other in free):
                continue
            same = (path.rpartition(".")[2], repr(one.old), repr(one.new))
            if same not in named:
                found.append(one)
            named.add(same)
    return found


def refuse(found: Sequence[Difference], accepted: Sequence[str], *, of: str) -> None:
    """Refuse differences that were not accepted.

    Args:
        found: What differs.
        accepted: Settings, or groups of them, that may.
        of: The checkpoint or run, for the message.

    Raises:
        ConfigError: Naming every other difference with its old and new value.
    """
    others = [one for one in found if not any(_is_within(one.key, key) for key in accepted)]
    if not others:
        return
    more = f"; and {len(others) - NAMED} more" if len(others) > NAMED else ""
    keys = list(dict.fromkeys([*accepted, *(one.key for one in others)]))
    raise ConfigError(
        f"{of} was made with other settings: {'; '.join(map(str, others[:NAMED]))}{more}; restore them, begin another "
        f"run with run_id=..., or accept the change with resume_accept=[{','.join(keys)}]."
    )


def _shorter(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    for unit in ("max_steps", "max_epochs"):
        before, after = _get(old, f"trainer.{unit}"), _get(new, f"trainer.{unit}")
        if isinstance(before, int) and isinstance(after, int) and before > 0 and after > 0:
            if after >= before:
                return []
            break
    given = [
        {key: value for key, value in (_get(config, LENGTH) or {}).items() if value is not None}
        for config in (old, new)
    ]
    if given[0] == given[1]:
        return []
    if len(given[0]) == 1 and given[0].keys() == given[1].keys():
        (key,) = given[0]
        return [Difference(key=f"{LENGTH}.{key}", old=given[0][key], new=given[1][key])]
    return [Difference(key=LENGTH, old=given[0], new=given[1])]


def _get(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Dotted paths to everything that is no mapping; what is null may as well be missing."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(f"{path}.{name}", value)
    elif isinstance(node, (list, tuple)):
        yield path, list(node)
    elif node is not None:
        yield path, node


def _is_within(path: str, group: str) -> bool:
    return path == group or path.startswith(f"{group}.")


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "nothing"
    return "null" if value is None else str(value)
