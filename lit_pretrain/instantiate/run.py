"""The objects of a training run, from its resolved configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_pretrain.callbacks import sort_callbacks
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.build import build, validate
from lit_pretrain.instantiate.closing import Closing
from lit_pretrain.instantiate.opening import TokenizerCopy
from lit_pretrain.instantiate.resuming import RunIdentity, accept_other_data


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything ``trainer.fit`` needs."""

    trainer: Trainer
    module: LightningModule
    datamodule: LightningDataModule


def build_run(config: Mapping[str, Any]) -> Run:
    """Construct a run.

    Args:
        config: The resolved configuration, plain containers.

    Raises:
        ConfigError: A setting that no constructor takes, or that one refuses; a decision with two owners.
    """
    # The settings a user writes stand at the top and are handed on inside other nodes: check them under their own
    # names first.
    for key in ("model", "optimizer"):
        if isinstance(config.get(key), Mapping):
            validate(config[key], key)
    if isinstance(config["strategy"], Mapping):
        validate(config["strategy"], "strategy")
    if isinstance(config["model"], Mapping) and not config["model"].get("_partial_"):
        build(config["model"], "model")
    datamodule = _build(config["data"], "data", LightningDataModule)
    accept_other_data(datamodule, config.get("resume_accept") or ())
    module = _build(config["module"], "module", LightningModule)
    return Run(trainer=build_trainer(config), module=module, datamodule=datamodule)


def _build(node: Any, where: str, kind: type, **extra: Any) -> Any:
    """What a node describes, if it is what belongs there.

    Lightning refuses settings with errors of many kinds; each becomes a sentence.
    """
    try:
        made = build(node, where, **extra)
    except (TypeError, RuntimeError, ImportError) as e:
        if kind is not Trainer:
            raise
        raise ConfigError(f"{where}: {' '.join(str(e).split())}") from e
    if not isinstance(made, kind):
        raise ConfigError(f"{where}._target_={node['_target_']} makes no {kind.__name__}; name a class that does.")
    return made


def build_trainer(config: Mapping[str, Any]) -> Trainer:
    """The trainer, with its callbacks in order and its logger.

    Raises:
        ConfigError: As :func:`build_run`.
    """
    node = dict(config["trainer"])
    for key, owner in (("callbacks", "callbacks.NAME"), ("logger", "logger")):
        if node.get(key) not in (None, False):
            raise ConfigError(
                f"trainer.{key} and {owner} decide the same thing; set {owner} and leave trainer.{key} out."
            )
        node.pop(key, None)
    callbacks = build_callbacks(config)
    plugins = build_plugins(node)
    logger = config.get("logger")
    # Without a Checkpoint callback Lightning adds one of its own, with `=` in its file names.
    saves = any(isinstance(c, Checkpoint) for c in callbacks)
    node.setdefault("enable_checkpointing", saves)
    own = (
        TokenizerCopy(Path(config["run"]["dir"])),
        RunIdentity(config, accepted=config.get("resume_accept") or ()),
    )
    trainer: Trainer = _build(
        node,
        "trainer",
        Trainer,
        plugins=plugins or None,
        callbacks=[*own, *callbacks, Closing()],
        logger=build(logger, "logger") if logger else False,
    )
    return trainer


def build_plugins(trainer: dict[str, Any]) -> list[Any]:
    """The trainer's plugins, and its precision where that is one; both are taken out of the trainer's settings.

    ``precision=fp16`` is one too: Lightning has no such word, and turns ``16-mixed`` into bf16 on a CPU.

    Args:
        trainer: Settings of the trainer; changed in place.
    """
    nodes = trainer.pop("plugins", None) or []
    nodes = nodes if isinstance(nodes, (list, tuple)) else [nodes]
    plugins = [build(n, f"trainer.plugins[{i}]") if isinstance(n, Mapping) else n for i, n in enumerate(nodes)]
    precision = trainer.get("precision")
    if precision == "fp16":
        precision = {"_target_": "lit_pretrain.plugins.MasterWeightPrecision", "precision": precision}
    if isinstance(precision, Mapping):
        plugins.append(build(precision, "precision"))
        del trainer["precision"]
    return plugins


def build_callbacks(config: Mapping[str, Any]) -> list[Callback]:
    """The schedule and the keyed callbacks, in the order they have to run; a key set to null is left out."""
    nodes = config.get("callbacks") or {}
    if not isinstance(nodes, Mapping):
        raise ConfigError(f"callbacks={nodes!r} must be a mapping of names to callbacks.")
    found = [build(node, f"callbacks.{name}") for name, node in nodes.items() if node is not None]
    if config.get("schedule"):
        found.insert(0, build(config["schedule"], "schedule"))
    for c in found:
        if not isinstance(c, Callback):
            raise ConfigError(
                f"callbacks: {type(c).__name__} is not a Lightning Callback; name another class in _target_."
            )
    return sort_callbacks(found)
