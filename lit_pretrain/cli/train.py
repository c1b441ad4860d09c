"""The ``train`` verb: configuration -> resolved plain YAML in the run folder -> one process per rank.

Neither torch nor Lightning is loaded here, unless this process is a rank itself (``run.inline``, torchrun, srun).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_pretrain.cli import agree, checks, launch, merging, ranks, report, resolvers, resume
from lit_pretrain.cli.claim import claimed, earlier_curves
from lit_pretrain.cli.resolvers import resolve
from lit_pretrain.errors import ConfigError

resolvers.register()  # at import: joblib's and submitit's workers import this module before they compose

HYDRA = ".hydra"
FRESH = "${fresh_id:}"
"""What conf/train.yaml says of a run that nobody named."""


def save(config: dict[str, Any], path: Path) -> None:
    """Write a configuration as YAML, complete or not at all."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(draft, path)


def words_of(hydra_config: Any) -> list[str]:
    """The overrides of a job, as they were written: ``${...}`` stays a word."""
    return [str(word) for word in OmegaConf.to_container(hydra_config.overrides.task, resolve=False) or ()]


def save_for_hydra(config: DictConfig, run_dir: Path) -> None:
    """Write what Hydra writes into ``.hydra``, but only once the folder is ours: a refused run leaves it alone."""
    folder = run_dir / HYDRA
    folder.mkdir(exist_ok=True)
    of_hydra = HydraConfig.get()
    for name, node in {"config": config, "hydra": {"hydra": of_hydra}, "overrides": of_hydra.overrides.task}.items():
        (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(node), encoding="utf-8")


def job(config: DictConfig) -> float | None:
    """One training run; returns ``optimized_metric``, which a sweeper of Hydra minimises."""
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    multirun = hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN"
    begun: list[bool] = []

    def begin() -> None:
        report.clear(run_dir)
        begun.append(True)

    try:
        result = _run(config, run_dir, multirun=multirun, begin=begin)
        optimised = multirun and not str(hydra_config.sweeper._target_).endswith(".BasicSweeper")
        return _metric(OmegaConf.select(config, "optimized_metric"), result["metrics"], needed=optimised)
    except Exception as e:
        # A run that was refused leaves the folder of an earlier one alone; the report of a sweep needs every failure.
        if begun or (multirun and ranks.is_rank_zero()):
            with suppress(OSError):  # a full disk must not hide what went wrong
                report.write(run_dir, words_of(hydra_config), e)
        if multirun:
            raise
        if not begun:
            report.leave_nothing()
        raise launch.Failed from e


def _metric(name: str | None, metrics: Mapping[str, float | None], *, needed: bool) -> float | None:
    """What a sweeper minimises; a good run may lack it (no held-out text) where no sweeper looks at it."""
    if name is not None and name in metrics:
        value = metrics[name]
        return float("nan") if value is None else float(value)  # result.json has no word for NaN and infinity
    if name is not None and needed:
        known = ", ".join(sorted(metrics)) or "none"
        raise ConfigError(f"optimized_metric={name} was not logged by the run; known: {known}.")
    return None


def _run(config: DictConfig, run_dir: Path, *, multirun: bool, begin: Callable[[], None]) -> dict[str, Any]:
    outer = ranks.external()
    named = OmegaConf.to_container(config, resolve=False)["run_id"] != FRESH  # type: ignore[call-overload, index]
    speaks = outer is None or outer.rank == 0
    with ExitStack() as stack:
        plain: dict[str, Any] = {}
        held: list[int] = []

        def composed() -> Mapping[str, Any]:
            sentences = merging.stays(config, words_of(HydraConfig.get()))
            for sentence in sentences if speaks else ():
                _say(sentence)
            plain.update(resolve(config))
            return plain

        def decide() -> dict[str, Any]:
            checks.check(plain, multirun=multirun)
            checks.writable(run_dir)
            held.append(stack.enter_context(claimed(run_dir)))
            decision = resume.decide(plain, run_dir, named=named, say=_say)
            if decision.kind == "new" and (curves := earlier_curves(run_dir)):
                _say(curves)
            place = None if decision.checkpoint is None else str(decision.checkpoint.absolute())
            return {"finished": decision.kind == "finished", "checkpoint": place}

        if outer is None:
            composed()
            decided = decide()
        else:
            store = agree.join(outer)
            stack.callback(id, store)  # rank 0 may be its server: it lives as long as the run
            decided = agree.agreed(store, outer, composed, decide)
        if decided["finished"]:
            return resume.read_result(run_dir)
        plain["run"] |= {"checkpoint": decided["checkpoint"]}
        if speaks:
            begin()
            save_for_hydra(config, run_dir)
            save(plain, run_dir / launch.RESOLVED)
        if outer is None and not plain["run"]["inline"]:
            watched = ranks.command_to_watch()
            return launch.run(run_dir, plain["run"]["num_processes"], orphan_of=watched, keep_open=held)
        from lit_pretrain.instantiate.job import train

        return train(plain)


def _say(sentence: str) -> None:
    print(f"lit-pretrain: {sentence}", file=sys.stderr, flush=True)
