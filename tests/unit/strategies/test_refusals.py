"""What a strategy refuses before any process starts; and what it takes."""

from __future__ import annotations

import subprocess

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig, GradientNorm, LossRanks, ParallelDims
from lit_pretrain.strategies import (
    ContextParallelStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)


def trainer(strategy, devices=1, **settings):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=1, **quiet, **settings)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def gpt(**changes):
    shape = {"vocab_size": 61, "block_size": 8, "n_layer": 2, "n_head": 6, "n_embd": 24}
    return GPTModule(GPTConfig(**{**shape, **changes}))


def loader():
    return torch.utils.data.DataLoader([0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeROStrategy(4), "strategy.stage=4 must be one of 0, 1, 2, 3."),
        (lambda: ZeROStrategy(0, replicate_size=2), "strategy.replicate_size=2 shards nothing at strategy.stage=0"),
        (lambda: HybridParallelStrategy(shard_size=2, stage=0), "strategy.shard_size=2 shards nothing at"),
        (lambda: ZeROStrategy(3, launcher="mpi"), "strategy.launcher='mpi' must be one of script, spawn, fork."),
        (lambda: ZeROStrategy(3, timeout_s=0), "strategy.timeout_s=0 must be above 0."),
        (lambda: ParallelDims(cp=0), "strategy.context_parallel_size=0 must be a whole number of at least 1."),
    ],
)
def test_settings(make, message):
    with pytest.raises(ConfigError) as e:
        make()
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        (TensorParallelStrategy(2), 3, "strategy.tensor_parallel_size=2 must divide the 3 ranks"),
        (ZeROStrategy(3, replicate_size=4), 6, "strategy.replicate_size=4 must divide the 6 ranks"),
        (
            HybridParallelStrategy(tensor_parallel_size=2, shard_size=2),
            8,
            "strategy.shard_size=2 x strategy.tensor_par",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_ranks(strategy, devices, message):
    with pytest.raises(ConfigError) as e:
        trainer(strategy, devices)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    ("module", "devices", "strategy", "message"),
    [
        (gpt(), 4, TensorParallelStrategy(), "strategy.tensor_parallel_size=4 must divide model.n_head=6; use 1 or 2."),
        (
            gpt(n_kv_head=3),
            2,
            TensorParallelStrategy(),
            "strategy.tensor_parallel_size=2 must divide model.n_kv_head=3",
        ),
        (
            gpt(),
            2,
            PipelineParallelStrategy(schedule="zbv", num_microbatches=4),
            "4 pipeline stages need at least 4 layers, but the model has 2; use at most 2 stages",
        ),
        (gpt(dropout=0.1), 2, ContextParallelStrategy(), "model.dropout=0.1 needs whole rows of attention weights"),
    ],
)
def test_a_model_that_does_not_fit(module, devices, strategy, message):
    with pytest.raises(ConfigError) as e:
        trainer(strategy, devices).fit(module, loader())
    assert str(e.value).startswith(message)


@pytest.mark.parametrize("strategy", [PipelineParallelStrategy(), ContextParallelStrategy()], ids=["pp", "cp"])
def test_a_module_that_fits_is_let_through_before_it_has_its_trainer(strategy, monkeypatch):
    """Lightning attaches the trainer after the launch, and the checks before it look at callbacks and data."""

    def launch(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", launch)
    with pytest.raises(AssertionError, match="a process was started"):
        trainer(strategy, 2).fit(gpt(n_head=4), loader())


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_a_plan():
    with pytest.raises(
        ConfigError, match=r"^strategy.tensor_parallel_size=2 needs a plan of how Plain splits its layers"
    ):
        trainer(TensorParallelStrategy(), 2).fit(Plain(), loader())


def test_names_are_registered():
    for name, stage in (("zero1", 1), ("zero2", 2), ("zero3", 3)):
        strategy = StrategyRegistry.get(name)
        assert isinstance(strategy, ZeROStrategy)
        assert strategy.zero.stage == stage
    assert isinstance(StrategyRegistry.get("tp"), TensorParallelStrategy)
    assert isinstance(StrategyRegistry.get("cp"), ContextParallelStrategy)
    assert isinstance(trainer("zero2").strategy, ZeROStrategy)


def test_what_other_rooms_ask_for():
    strategy = ZeROStrategy(3)
    assert isinstance(strategy, GradientNorm)
    assert hasattr(LossRanks, "num_loss_ranks")
    assert strategy.is_distributed


def test_precision_stays_unset_until_the_trainer_sets_it():
    assert ZeROStrategy(3)._precision_plugin is None
    assert trainer(ZeROStrategy(3), precision="bf16-mixed").precision == "bf16-mixed"
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert trainer(ZeROStrategy(3), plugins=[plugin]).precision == "bf16-mixed"


def test_dimensions_follow_the_devices():
    assert trainer(ZeROStrategy(0), 4).strategy.dims.dp_replicate == 4
    assert trainer(ZeROStrategy(2, replicate_size=2), 4).strategy.dims.sizes == {
        "dp_replicate": 2, "dp_shard": 2, "pp": 1, "cp": 1, "tp": 1,
    }  # fmt: skip
    assert trainer(TensorParallelStrategy(), 4).strategy.dims.tp == 4
    assert trainer("cp", 4).strategy.dims.cp == 4
    assert trainer(ContextParallelStrategy(2, stage=3), 4).strategy.dims.sizes == {
        "dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 2, "tp": 1,
    }  # fmt: skip
    both = trainer(HybridParallelStrategy(tensor_parallel_size=2, stage=3), 8, num_nodes=2).strategy.dims
    assert (both.dp_shard, both.tp, both.world_size) == (8, 2, 16)
