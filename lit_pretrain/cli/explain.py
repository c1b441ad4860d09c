"""The ``explain`` verb: what ``train`` would do with the same words. Starts nothing, loads no torch, no Lightning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_pretrain.cli import checks, hints, launch, merging, resolvers
from lit_pretrain.cli.explanation import Hardware, sections
from lit_pretrain.cli.outlook import look
from lit_pretrain.cli.suspicions import suspicions
from lit_pretrain.cli.table import layout
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.build import NEEDED
from lit_pretrain.planning import PEAK_FLOPS, peak_flops

resolvers.register()

OWN = "explain"
"""The one key that ``train`` does not have."""
GPUS = Path("/proc/driver/nvidia/gpus")


def job(config: DictConfig) -> None:
    """Print what a run would be; the exit code is 1 when ``train`` would refuse it."""
    try:
        _explain(config)
    except Exception as e:
        raise launch.Failed from e


def _explain(config: DictConfig) -> None:
    words = [str(word) for word in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False) or ()]
    merged: list[str] = []
    plain, errors = resolve_gently(config, words)
    try:
        merged = merging.stays(config, words)
    except ConfigError as e:
        errors.append(str(e))
    hardware = find_hardware(plain.pop(OWN, {}) or {})
    outlook = look(plain)
    more = [*checks.violations(plain), *outlook.errors]
    if errors:  # what could not be resolved is missing: that has been said
        more = [sentence for sentence in more if not sentence.endswith(NEEDED)]
    errors = list(dict.fromkeys([*errors, *more]))
    text = layout(sections(outlook, hardware))
    text += _sentences("suspicious", [*merged, *suspicions(outlook)]) + _sentences("illegal", errors)
    sys.stdout.write(text)
    if errors:
        count = "1 setting" if len(errors) == 1 else f"{len(errors)} settings"
        raise ConfigError(f"train would refuse this: {count} must change, listed above as illegal.")


def _sentences(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f"\n{title}\n" + "".join(f"  - {sentence}\n" for sentence in sentences)


def resolve_gently(config: DictConfig, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The configuration as plain containers, and a sentence for everything in it that cannot be resolved.

    Args:
        config: As composed.
        words: The command line, for hints.

    Returns:
        Without the keys that could not be resolved.
    """
    errors: list[str] = []

    def plain(node: Any) -> Any:
        if isinstance(node, DictConfig):
            return {str(key): value for key in node for value in got(node, key)}
        if isinstance(node, ListConfig):
            return [value for index in range(len(node)) for value in got(node, index)]
        return node

    def got(node: Any, key: Any) -> list[Any]:
        try:
            return [plain(node[key])]
        except OmegaConfBaseException as e:
            errors.append(hints.explain(e, "train", words))
            return []

    return plain(config), list(dict.fromkeys(errors))


def find_hardware(own: dict[str, Any]) -> Hardware:
    """What the run would be computed on.

    Args:
        own: ``device`` (a GPU's name; None is this machine's) and ``utilisation``.

    Raises:
        ConfigError: The name is not in the table, or the share is none.
    """
    share = own.get("utilisation")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
        raise ConfigError(f"explain.utilisation={share} must be above 0 and at most 1; 0.4 is usual.")
    name = own.get("device")
    if name is not None and peak_flops(str(name)) is None:
        raise ConfigError(f"explain.device={name} is not in the table; use one of {', '.join(PEAK_FLOPS)}.")
    name = gpu_name() if name is None else str(name)
    return Hardware(name=name, peak=None if name is None else peak_flops(name), utilisation=float(share))


def gpu_name(folder: Path = GPUS) -> str | None:
    """Name of this machine's first NVIDIA GPU, as its driver says it; None without one."""
    for path in sorted(folder.glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return None
