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
)
WITH_OPTIONAL_VALUE = ("--info", "-i")
INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CHOICES = {"--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all")}
SWEEPS = ("train",)
"""Verbs that run several times with -m."""
POSITIONAL = {"generate": "run", "evaluate": "run", "inspect": "run"}
"""Verb to the setting that one bare word stands for."""
FLAGS = (*SWITCHES, *SWITCHES_OF_COMPLETION, *WITH_VALUE, *WITH_OPTIONAL_VALUE)
"""The flags of Hydra 1.3, but for --experimental-rerun."""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the rest."""
    flags: list[str] = []
    rest: list[str] = []
    takes_next = False
    for word in argv:
        before = flags[-1] if flags else ""
        if takes_next or (before in WITH_OPTIONAL_VALUE and word in INFORMATION):
            flags.append(word)
            takes_next = False
        elif word.startswith("-"):
            flags.append(word)
            takes_next = word in WITH_VALUE
        else:
            rest.append(word)
    return flags, rest


def overrides(argv: Sequence[str]) -> list[str]:
    """The words of a command line that are neither flags nor the values of flags."""
    return _split(argv)[1]


def arranged(argv: Sequence[str]) -> list[str]:
    """The same command line with its flags first: Hydra refuses settings on both sides of a flag."""
    found, rest = _split(argv)
    return [*found, *rest]


def named(verb: str, argv: Sequence[str]) -> list[str]:
    """The same command line with a verb's one bare word written as the setting that it stands for."""
    found, rest = _split(argv)
    name = POSITIONAL.get(verb)
    bare = [word for word in rest if "=" not in word and not word.startswith("~")]
    if name is None or len(bare) != 1 or any(word.startswith(f"{name}=") for word in rest):
        return list(argv)
    return [*found, *(f"{name}={word}" if word in bare else word for word in rest)]


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
        if name == "--experimental-rerun":
            return f"{name} reads a pickle, which may run any program; go on with a run by run_id=NAME resume=auto."
        if name in CHOICES:
            value = value_of(argv, name)
            if value not in CHOICES[name]:
                return f"{name} {value or ''} is unknown; use {name} {', '.join(CHOICES[name])}.".replace("  ", " ")
        elif name in WITH_VALUE and value_of(argv, name) is None:
            return f"{name} needs a value."
        if name in ("-m", "--multirun") and verb not in SWEEPS:
            return f"{name} makes sweeps of {' and '.join(SWEEPS)}; run {verb} once for each setting."
        if name in known or any(len(name) > 3 and flag.startswith(name) for flag in known):
            continue
        setting = name.lstrip("-").replace("-", "_")
        hint = (
            nearest(name, known) if "=" not in word else f"settings have no dashes: {setting}={word.split('=', 1)[1]}"
        )
        return f"{name} is not a flag of lit-pretrain {verb}; {hint}"
    for word in overrides(argv):
        if word.lstrip("+").startswith("hydra.mode=") and verb not in SWEEPS:
            return f"{word} makes sweeps of {' and '.join(SWEEPS)}; run {verb} once for each setting."
        if word.lstrip("+").startswith("run.dir="):
            return f"{word}: a run's folder follows from output_root and run_id; say output_root=FOLDER run_id=NAME."
        if "=" not in word and not word.startswith("~"):
            if any(other.count("{") > other.count("}") or other.count("[") > other.count("]") for other in argv):
                return f"{word!r} is part of a value with spaces, which needs quotes, as in 'NAME={{a: b}}'."
            return f"{word!r}: a setting is written name=value, a choice group=option, a removal ~name."
    return None
