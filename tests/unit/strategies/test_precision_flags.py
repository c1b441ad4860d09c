"""Which plugin a flag, a plugin and an argument mean under our strategies; two of them at once are refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, TransformerEnginePrecision

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import MasterWeightPrecision
from lit_pretrain.strategies import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)


def plugin_of(strategy: Any, **settings: Any) -> Any:
    run = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False, **settings
    )
    return run.precision_plugin


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, "fp32"), ({"precision": "32-true"}, "fp32"), ({"precision": "bf16-mixed"}, "bf16")],
)
def test_flags(settings: dict[str, Any], kind: str) -> None:
    plugin = plugin_of(ZeROStrategy(3), **settings)
    assert isinstance(plugin, MasterWeightPrecision)
    assert plugin.kind == kind


def test_float16_as_lightning_makes_it_on_cuda() -> None:
    """On a CPU Lightning never hands it over."""
    scaler = torch.amp.GradScaler("cpu")
    plugin = plugin_of(ZeROStrategy(3), plugins=[MixedPrecision("16-mixed", "cuda", scaler=scaler)])
    assert isinstance(plugin, MasterWeightPrecision)
    assert (plugin.kind, plugin.loss_scale) == ("fp16", 2.0**15)


def test_a_scaler_with_settings_is_not_dropped_in_silence() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    with pytest.raises(ConfigError, match=r"^trainer\.plugins holds a GradScaler with settings of its own"):
        plugin_of(ZeROStrategy(3), plugins=[MixedPrecision("16-mixed", "cuda", scaler=scaler)])


@pytest.mark.parametrize(("flag", "kind"), [("64-true", DoublePrecision), ("bf16-true", HalfPrecision)])
def test_other_precisions_stay_lightnings_own(flag: Any, kind: type) -> None:
    assert type(plugin_of(ZeROStrategy(3), precision=flag)) is kind


@pytest.mark.parametrize(
    "strategy", [ZeROStrategy, TensorParallelStrategy, PipelineParallelStrategy, HybridParallelStrategy]
)
def test_the_strategys_argument(strategy: Any) -> None:
    assert plugin_of(strategy(precision="fp16")).kind == "fp16"
    own = MasterWeightPrecision("bf16")
    assert plugin_of(strategy(precision=own)) is own


def test_two_owners_are_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match=r"^strategy\.precision=fp16 and trainer\.precision=bf16-mixed are both set"):
        plugin_of(ZeROStrategy(precision="fp16"), precision="bf16-mixed")
    with pytest.raises(ConfigError, match=r"^strategy\.precision=fp16 and trainer\.precision=64-true are both set"):
        plugin_of(ZeROStrategy(precision="fp16"), precision="64-true")
    with pytest.raises(ConfigError, match=r"^strategy\.precision=fp16 and trainer\.precision=16-mixed are both set"):
        plugin_of(ZeROStrategy(precision="fp16"), plugins=MasterWeightPrecision("fp16"))
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*MasterWeightPrecision"):
        plugin_of(ZeROStrategy(), plugins=MasterWeightPrecision("fp16"), precision="bf16-mixed")


def test_unknown_words() -> None:
    with pytest.raises(ConfigError, match=r"^strategy\.precision='half' must be bf16, fp16, fp32 or a"):
        ZeROStrategy(precision="half")


def test_a_plugin_of_another_kind() -> None:
    foreign = object.__new__(TransformerEnginePrecision)
    with pytest.raises(ConfigError, match=r"^trainer\.precision='transformer-engine' does not work with this strategy"):
        plugin_of(ZeROStrategy(), plugins=foreign)
