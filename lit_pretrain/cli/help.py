"""``lit-pretrain VERB --help``: Hydra's page for the verb, without the second that Hydra takes to list the groups."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lit_pretrain.cli import flags

CONFIGS = "lit_pretrain.conf"
WORDS = ("-h", "--help")


def page(verb: str, argv: Sequence[str]) -> str:
    """The text of ``--help``.

    Args:
        verb: The primary configuration, whose ``hydra.help.template`` is filled in.
        argv: Hydra's flags and overrides; they change what is shown.

    Raises:
        Exception: What Hydra raises for overrides that are wrong.
    """
    words = list(flags.overrides(argv))
    folder = flags.value_of(argv, "--config-dir", "-cd")
    if folder is not None:
        words.append(f"hydra.searchpath=[file://{Path(folder).absolute()}]")
    with initialize_config_module(CONFIGS, version_base="1.3"):
        config = compose(flags.value_of(argv, "--config-name", "-cn") or verb, words, return_hydra_config=True)
    template = Template(config.hydra.help.template)
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    places: list[Traversable] = [files(CONFIGS)]
    more = [str(path) for path in config.hydra.searchpath or ()]
    places += [Path(path.removeprefix("file://")) for path in more if path.startswith("file://")]
    return template.safe_substitute(APP_CONFIG_GROUPS=groups(places), CONFIG=OmegaConf.to_yaml(own))


def groups(places: Sequence[Traversable]) -> str:
    """One line for each group of options: ``optimizer: adamw``."""
    found: dict[str, set[str]] = {}
    for place in places:
        for folder in place.iterdir() if place.is_dir() else ():
            names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
            options = {name.removesuffix(".yaml") for name in names if name.endswith(".yaml")}
            if options:
                found.setdefault(folder.name, set()).update(options)
    return "".join(f"{name}: {', '.join(sorted(options))}\n" for name, options in sorted(found.items()))
