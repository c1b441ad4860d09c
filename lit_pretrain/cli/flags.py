"""Checks the words of a command line before Hydra sees them: flags it knows, and settings written name=value."""

from __future__ import annotations

from collections.abc import Sequence

from lit_pretrain.instantiate.nearest import nearest

SWITCHES = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
SWITCHES_OF_COMPLETION = ("--shell-completion", "-sc")
WITH_VALUE = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--experimental-rerun",
)
WITH_OPTIONAL_VALUE = ("--info", "-i")
FLAGS = (*SWITCHES, *SWITCHES_OF_COMPLETION, *WITH_VALUE, *WITH_OPTIONAL_VALUE)
"""The flags of Hydra 1.3."""


def overrides(argv: Sequence[str]) -> list[str]:
    """The words of a command line that are neither flags nor the values of flags."""
    found: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in WITH_VALUE
        else:
            found.append(word)
    return found


def value_of(argv: Sequence[str], *names: str) -> str | None:
    """The value of a flag, or None; ``names`` are its spellings."""
    for i, word in enumerate(argv):
        name, sign, value = word.partition("=")
        if name in names:
            if sign:
                return value
            return argv[i + 1] if i + 1 < len(argv) else None
    return None


def check(verb: str, argv: Sequence[str]) -> str | None:
    """One sentence about the first wrong word, or None."""
    known = set(FLAGS)
    for word in argv:
        if not word.startswith("-"):
            continue
        name = word.partition("=")[0]
        if name in known or any(len(name) > 3 and flag.startswith(name) for flag in known):
            continue
        setting = name.lstrip("-").replace("-", "_")
        hint = (
            nearest(name, known) if "=" not in word else f"settings have no dashes: {setting}={word.split('=', 1)[1]}"
        )
        return f"{name} is not a flag of lit-pretrain {verb}; {hint}"
    optional = {argv[i + 1] for i, word in enumerate(argv[:-1]) if word in WITH_OPTIONAL_VALUE}
    for word in overrides(argv):
        if "=" not in word and not word.startswith("~") and word not in optional:
            return f"{word!r}: a setting is written name=value, a choice group=option, a removal ~name."
    return None
