"""Binds the pure functions of :mod:`lit_pretrain.cli.derive` to interpolations of the configuration."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_pretrain.cli import derive, layout, ranks
from lit_pretrain.errors import ConfigError


def new_id() -> str:
    """A run id that no other run picks: the time and 4 random bytes. Sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def fresh_id() -> str:
    """A new run id, the same in every rank of one run."""
    outer = ranks.external()
    if outer is None:
        return new_id()
    if outer.by == "torchrun":
        return _through_the_store(outer.rank)
    return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def _through_the_store(rank: int) -> str:
    """Rank 0's id, through the store that torchrun's agent serves."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("this torchrun serves no store for the ranks to agree on a run folder; add run_id=NAME.")
    store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60))
    key = f"lit_pretrain/run_id/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(key, new_id())
    value: bytes = store.get(key)
    return value.decode()


def _num_devices(devices: Any, accelerator: str) -> int:
    plain = OmegaConf.to_container(devices) if OmegaConf.is_config(devices) else devices
    return derive.num_devices(plain, accelerator, derive.visible_gpus())


def _single_device(accelerator: str) -> str:
    return derive.single_device(accelerator, derive.visible_gpus())


def _product(*numbers: int) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def _data_parallel_size(strategy: Any, processes: object, nodes: object) -> int:
    plain = OmegaConf.to_container(strategy, resolve=True) if OmegaConf.is_config(strategy) else strategy
    local = derive.whole("run.num_processes", processes)
    return layout.data_parallel_size(plain, local * derive.whole("trainer.num_nodes", nodes))


def register() -> None:
    """Register every resolver; calling it again changes nothing.

    Called when a verb's module is imported: the workers of joblib and submitit import it before they compose.
    """
    plain: dict[str, Callable[..., Any]] = {
        "accumulation": derive.accumulation,
        "data_parallel_size": _data_parallel_size,
        "every_microbatches": derive.every_microbatches,
        "max_epochs": derive.max_epochs,
        "max_steps": derive.max_steps,
        "num_devices": _num_devices,
        "product": _product,
        "single_device": _single_device,
        "tokens_per_update": derive.tokens_per_update,
    }
    for name, function in plain.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    # One value per composed configuration; Hydra hands the cache from a sweep to its jobs, as it does for ${now:}.
    OmegaConf.register_new_resolver("fresh_id", fresh_id, use_cache=True, replace=True)


def resolve(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, every interpolation done, nothing missing."""
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}
