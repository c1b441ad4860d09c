"""What can be said about a resolved configuration before any process starts: no torch, no Lightning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lit_pretrain.cli import derive, ranks
from lit_pretrain.cli.layout import check_layout
from lit_pretrain.cli.numbers import check_numbers
from lit_pretrain.corpus import ShardFolders
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.build import build
from lit_pretrain.instantiate.nearest import nearest
from lit_pretrain.planning.memory import NUMBER_FORMATS, precision_word

KNOWN = (
    "batch",
    "cache_dir",
    "callbacks",
    "data",
    "length",
    "logger",
    "model",
    "module",
    "optimized_metric",
    "optimizer",
    "output_root",
    "precision",
    "resume",
    "resume_accept",
    "run",
    "run_id",
    "schedule",
    "seed",
    "strategy",
    "trainer",
    "validation",
)
"""Top-level keys of a training run."""

DATA = "lit_pretrain.data.TokenDataModule"
MODULE = "lit_pretrain.module.GPTModule"
TRAINER = "lightning.pytorch.Trainer"
LIGHT = ("lit_pretrain.specs.", "lit_pretrain.corpus.")
"""Targets that can be built here: their rooms need no torch."""


def check(config: Mapping[str, Any], *, multirun: bool) -> None:
    """Refuse what cannot run.

    Args:
        config: The resolved configuration, plain containers.
        multirun: Whether this run is a job of a sweep.

    Raises:
        ConfigError: With the setting, the value, the rule and the way out.
    """
    for one in _each(config, multirun=multirun):
        one()


def violations(config: Mapping[str, Any]) -> list[str]:
    """Every sentence that :func:`check` could raise, not only the first.

    Args:
        config: Plain containers; settings that could not be resolved may be missing, and are passed over.
    """
    sentences: list[str] = []
    for one in _each(config, multirun=False):
        try:
            one()
        except ConfigError as e:
            sentences.append(str(e))
        except (KeyError, TypeError, AttributeError):  # it needs what is missing, which has a sentence of its own
            continue
    return list(dict.fromkeys(sentences))


def _each(config: Mapping[str, Any], *, multirun: bool) -> list[Callable[[], None]]:
    return [
        *(partial(_key, str(key)) for key in config),
        lambda: _seed(config["seed"]),
        lambda: _folder(config),
        lambda: _needed(config),
        lambda: _nodes(config),
        lambda: _length(config),
        lambda: _derived(config),
        lambda: check_numbers(config),
        lambda: _precision(config),
        lambda: _model(config),
        lambda: _corpus(config),
        lambda: _processes(config, multirun=multirun),
        lambda: _layout(config),
    ]


def _key(key: str) -> None:
    if key not in KNOWN:
        raise ConfigError(f"{key} is not a setting of train; {nearest(key, KNOWN)}")


def _seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}.")


def _length(config: Mapping[str, Any]) -> None:
    derive.whole("batch.sequence_length", config["batch"]["sequence_length"])


NEEDED = ("batch", "data", "model", "module", "strategy", "trainer")
"""Top-level keys that no run can do without."""


def _needed(config: Mapping[str, Any]) -> None:
    for key in NEEDED:
        if key not in config:
            raise ConfigError(f"{key} is missing, and no run can do without it; leave out ~{key}.")


def _nodes(config: Mapping[str, Any]) -> None:
    """Groups of settings that were set to something else."""
    for key in ("module", "data", "trainer"):
        node = config[key]
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ConfigError(f"{key}={node!r} must be a group of settings with a _target_; leave {key} out.")
    module, data = config["module"], config["data"]
    if data["_target_"] == DATA and not isinstance(data.get("corpus"), Mapping):
        raise ConfigError(
            f"data.corpus={data.get('corpus')!r} must say where the text is; choose data=default or data=shards, and "
            f"leave data.corpus out."
        )
    target = str((config.get("optimizer") or {}).get("_target_", ""))
    if module["_target_"] == MODULE and target.startswith("torch.optim."):
        raise ConfigError(
            f"optimizer._target_={target} takes parameters, and the module calls it with the model; name a function of "
            f"the model, such as lit_pretrain.optim.adamw."
        )
    if module["_target_"] == MODULE and not isinstance(module.get("config"), Mapping):
        raise ConfigError(
            f"module.config={module.get('config')!r} must be the settings of a model; choose one with model=NAME, and "
            f"leave module.config out."
        )


def _derived(config: Mapping[str, Any]) -> None:
    """Values that follow from the user's words, where somebody has set them too."""
    batch, trainer, length = config["batch"], config["trainer"], config.get("length") or {}
    sizes = ("global_batch_size", "micro_batch_size", "data_parallel_size")
    tokens = batch["global_batch_size"] * batch["sequence_length"]
    rules: list[tuple[str, Any, Any, str]] = [
        ("batch.accumulation", batch["accumulation"], derive.accumulation(*(batch[key] for key in sizes)), "batch"),
        ("batch.tokens_per_update", batch["tokens_per_update"], tokens, "batch"),
        ("trainer.accumulate_grad_batches", trainer.get("accumulate_grad_batches"), batch["accumulation"], "batch"),
    ]
    given = {key: length.get(key) for key in ("steps", "tokens", "epochs")}
    if any(value is not None for value in given.values()):
        steps = derive.max_steps(given["steps"], given["tokens"], given["epochs"], batch["tokens_per_update"])
        word = next(f"length.{key}={value}" for key, value in given.items() if value is not None)
        rules.append(("trainer.max_steps", trainer.get("max_steps"), steps, word))
    for name, value, expected, origin in rules:
        if value is not None and value != expected:
            raise ConfigError(
                f"{name}={value} disagrees with {origin}, from which {expected} follows; leave {name} out."
            )


def _folder(config: Mapping[str, Any]) -> None:
    """Without a name of its own a run would land in the folder that holds all runs, or in the root of the disk."""
    derive.run_name(config["run_id"])
    root = config["output_root"]
    if not isinstance(root, (str, int, float)) or not str(root).strip():
        raise ConfigError(f"output_root={root!r} must name a folder, such as output_root=outputs; or leave it out.")


def _precision(config: Mapping[str, Any]) -> None:
    trainer, words = config["trainer"], (*NUMBER_FORMATS, "transformer-engine", "transformer-engine-float16")
    value = trainer.get("precision")
    set_at = _precision_settings(config)
    if len(set_at) > 1:
        raise ConfigError(f"{set_at[0]} and {set_at[1]} both set the precision; remove one of them.")
    if isinstance(value, Mapping):
        return
    if value is not None and trainer.get("_target_") == TRAINER and str(value) not in words:
        raise ConfigError(f"trainer.precision={value!r} must be one of {', '.join(words)}.")
    if str(value) in ("16", "16-mixed") and _on_cpu(trainer):
        raise ConfigError(
            f"trainer.precision={value} needs a GPU: on a CPU Lightning would train in bf16 instead and only warn; use "
            f"precision=fp16, which is real float16 with a loss scale, or precision=bf16."
        )


def _precision_settings(config: Mapping[str, Any]) -> list[str]:
    """Everything that sets the precision, as a user would find it."""
    trainer, strategy = config["trainer"], config.get("strategy")
    found = [] if trainer.get("precision") is None else [f"trainer.precision={precision_word(trainer['precision'])}"]
    for i, plugin in enumerate(trainer.get("plugins") or ()):
        target = str(plugin.get("_target_", "")) if isinstance(plugin, Mapping) else ""
        if target.endswith("Precision"):
            found.append(f"trainer.plugins[{i}] ({target.rpartition('.')[2]})")
    if isinstance(strategy, Mapping):
        for key in ("precision", "precision_plugin"):
            value = strategy.get(key)
            if value is not None:
                found.append(f"strategy.{key}={precision_word(value) if key == 'precision' else '...'}")
    return found


def _on_cpu(trainer: Mapping[str, Any]) -> bool:
    accelerator = trainer.get("accelerator", "auto")
    return accelerator == "cpu" or (accelerator == "auto" and not derive.visible_gpus() and sys.platform != "darwin")


def is_light(node: object) -> bool:
    """Whether a node's class can be built without torch."""
    return isinstance(node, Mapping) and str(node.get("_target_", "")).startswith(LIGHT)


def _model(config: Mapping[str, Any]) -> None:
    model = config["model"]
    if not isinstance(model, Mapping):
        raise ConfigError(f"model={model!r} must be a group's option: model=NAME.")
    if not is_light(model):
        return  # somebody else's architecture
    block_size = build(model, "model").block_size
    length = config["batch"]["sequence_length"]
    if isinstance(length, int) and length > block_size:
        raise ConfigError(
            f"batch.sequence_length={length} must be at most model.block_size={block_size}; shorten the sequences, or "
            f"train a longer context with model.block_size={length}."
        )


def _corpus(config: Mapping[str, Any]) -> None:
    data = config["data"]
    if not isinstance(data, Mapping) or not is_light(data.get("corpus")):
        return
    corpus = build(data["corpus"], "data.corpus")
    if not isinstance(corpus, ShardFolders):
        return  # may be there only after prepare(), which takes a while
    if corpus.locate().tokenizer is None and (config.get("callbacks") or {}).get("sampler") is not None:
        raise ConfigError(
            "callbacks.sampler writes text, but data.corpus.tokenizer is null; name the tokenizer.json of the data, or "
            "drop the callback with ~callbacks.sampler."
        )


def _processes(config: Mapping[str, Any], *, multirun: bool) -> None:
    run, trainer, strategy = config["run"], config["trainer"], config["strategy"]
    local, nodes = run["num_processes"], trainer.get("num_nodes", 1)
    target = str(strategy.get("_target_", "")) if isinstance(strategy, Mapping) else ""
    if target.endswith(".SingleDeviceStrategy") and local * nodes > 1:
        raise ConfigError(
            f"strategy=single trains on one device, but trainer.devices={trainer.get('devices')} and "
            f"trainer.num_nodes={nodes} ask for {local * nodes}; use strategy=ddp, or trainer.devices=1."
        )
    outer = ranks.external()
    if outer is None:
        if nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes={nodes} needs a launcher on every node: start the same command with torchrun or "
                f"srun."
            )
        if run["inline"] and (local > 1 or multirun):
            raise ConfigError("run.inline=true is for one job of one process; drop -m, and use trainer.devices=1.")
        return
    if multirun:
        raise ConfigError(
            f"-m under {outer.by} would run the whole sweep in every rank; drop -m, or drop the outer launcher."
        )
    if local * nodes != outer.world_size:
        raise ConfigError(
            f"{outer.by} started {outer.world_size} ranks, but trainer.devices={trainer.get('devices')} x "
            f"trainer.num_nodes={nodes} is {local * nodes}; make them equal."
        )


def _layout(config: Mapping[str, Any]) -> None:
    """Sizes of the strategy against ranks, model and batch: the ranks would say it later, and all at once."""
    model, nodes = config["model"], config["trainer"].get("num_nodes", 1)
    check_layout(
        config["strategy"],
        world_size=config["run"]["num_processes"] * nodes,
        model=build(model, "model") if is_light(model) else None,
        batch=config["batch"],
        callbacks=config.get("callbacks") or {},
    )


def writable(run_dir: Path) -> None:
    """Refuse a run folder that cannot be written to.

    Raises:
        ConfigError: With the reason that the system gives.
    """
    probe = run_dir / ".writable"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise ConfigError(
            f"the run folder {run_dir} cannot be written to ({e.strerror}); choose another with output_root=... or "
            f"run_id=...."
        ) from e
