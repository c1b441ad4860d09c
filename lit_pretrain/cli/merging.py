"""Hydra merges a mapping that is given on the command line into what is there: what stays is easily overlooked."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lit_pretrain.errors import ConfigError


def stays(config: DictConfig, words: Sequence[str]) -> list[str]:
    """A sentence for every mapping of the command line that left other names beside its own.

    Only mappings whose names are the user's own are judged, such as ``data.corpus.sources``; that a setting stays where
    another of its group is changed surprises nobody.

    Args:
        config: As composed, the words included.
        words: Overrides.

    Raises:
        ConfigError: An empty mapping, which changes nothing.
    """
    sentences = []
    for given in OverridesParser.create().parse_overrides([word for word in words if "{" in word]):
        value, key = given.value(), str(given.key_or_group)
        node = OmegaConf.select(config, key)
        if not isinstance(value, dict) or given.is_sweep_override() or not isinstance(node, DictConfig):
            continue
        names = {str(name) for name in value}
        others = [str(name) for name in node if str(name) not in names]
        way_out = f"to replace it write '~{key}' '+{key}={{NAME: ...}}'."
        if not value and others:
            raise ConfigError(
                f"{key}={{}} changes nothing: a mapping is merged into what is there ({', '.join(others)}); {way_out}"
            )
        parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else None
        if others and "_target_" not in node and isinstance(parent, DictConfig) and "_target_" in parent:
            word = "stays" if len(others) == 1 else "stay"
            sentences.append(f"{given.input_line} is merged into what is there: {', '.join(others)} {word}; {way_out}")
    return sentences
