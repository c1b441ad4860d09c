"""Which rank a process is, from the variables that launchers set, and variables that belong to another run."""

from __future__ import annotations

import os
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_pretrain.errors import ConfigError
from lit_pretrain.strategies import HybridParallelStrategy, ZeROStrategy, _compat, processes

KINDS = ("SLURM", "TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "WORLD_SIZE", "RANK", "NODE_RANK")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """No variable of a launcher, before and after; Lightning sets some."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(KINDS):
            monkeypatch.delenv(name)
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith(KINDS):
            del os.environ[name]


def trainer(strategy, *, devices=2, num_nodes=2):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, **quiet)


def slurm(monkeypatch, rank, **changes):
    """Variables of one of 4 processes that srun starts on 2 nodes."""
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "node[07-08]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_CPUS_PER_TASK": "1",
        **changes,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", range(4))
def test_two_nodes_of_two_under_slurm(monkeypatch, rank):
    slurm(monkeypatch, rank)
    met = []
    monkeypatch.setattr(_compat, "init_process_group", lambda environment, **_: met.append(environment))
    monkeypatch.setattr(processes, "RankMesh", lambda dims, **_: SimpleNamespace(dims=dims))
    run = trainer(HybridParallelStrategy(tensor_parallel_size=2, stage=3))
    strategy = run.strategy
    strategy.setup_environment()
    (environment,) = met
    assert isinstance(environment, SLURMEnvironment)
    assert strategy.launcher is None  # srun has started all
    assert (environment.global_rank(), environment.world_size()) == (rank, 4)
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (rank, rank % 2, rank // 2)
    assert strategy.is_global_zero == (rank == 0)
    assert environment.main_address == "node07"
    assert strategy.mesh.dims.sizes == {"dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 1, "tp": 2}


def test_another_number_of_tasks_is_refused_before_ranks_look_for_each_other(monkeypatch):
    slurm(monkeypatch, 0, SLURM_NTASKS="8")
    with pytest.raises(ConfigError, match=r"^The launcher says there are 8 ranks, but trainer.devices=2 x .*=2 is 4;"):
        trainer(ZeROStrategy(3))


def elastic(monkeypatch, **changes):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**variables, **changes}.items():
        monkeypatch.setenv(name, value)


def test_stale_variables_of_torchrun(monkeypatch):
    elastic(monkeypatch, WORLD_SIZE="8")
    with pytest.raises(
        ConfigError, match=r"says there are 8 ranks, .*=1 is 2; .* unset stale variables such as WORLD_"
    ):
        trainer(ZeROStrategy(3), num_nodes=1)
    elastic(monkeypatch, LOCAL_RANK="5")
    with pytest.raises(ConfigError, match=r"^This process is number 5 on its machine, but .* numbers below 2; unset"):
        trainer(ZeROStrategy(3), num_nodes=1)


def test_a_stale_local_rank(monkeypatch):
    """Lightning takes it for a sign that somebody else starts the other ranks, and would wait for them for ever."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        ConfigError, match=r"^LOCAL_RANK=0 says that something else starts the 2 ranks, but MASTER_PORT"
    ):
        trainer(ZeROStrategy(3), num_nodes=1)
    assert trainer(ZeROStrategy(3), num_nodes=1, devices=1).strategy.dims.world_size == 1
    monkeypatch.setenv("MASTER_PORT", "1")
    assert trainer(ZeROStrategy(3), num_nodes=1).strategy.launcher is None  # started by hand, as Lightning allows


def test_sizes_are_checked_against_all_nodes():
    with pytest.raises(
        ConfigError, match=r"^strategy.tensor_parallel_size=3 must divide the 4 ranks \(trainer.devices x"
    ):
        trainer(HybridParallelStrategy(tensor_parallel_size=3))
