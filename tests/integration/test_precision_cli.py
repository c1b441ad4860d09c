"""Precision from the command line: the word becomes the plugin, and two owners are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.cli import checks
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.run import build_trainer
from lit_pretrain.planning.memory import precision_word
from lit_pretrain.plugins import MasterWeightPrecision
from tests.conf import tiny

SHARDS = ["data=default", *(s for s in tiny.SHRINK if "vocab_size" not in s), "callbacks=none", "logger=none"]


def composed(folder: Path, *overrides: str) -> dict[str, Any]:
    return tiny.composed(folder, [*SHARDS, *overrides])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_an_option_is_the_plugin_with_its_settings(kind: str, tmp_path: Path) -> None:
    overrides = [f"precision={kind}", "precision.keep_fp32=[model.norm]"]
    overrides += ["precision.scaler.growth_interval=7"] if kind == "fp16" else []
    config = composed(tmp_path, *overrides)
    checks.check(config, multirun=False)
    plugin = build_trainer(config).precision_plugin
    assert isinstance(plugin, MasterWeightPrecision)
    assert (plugin.kind, plugin.keep_fp32) == (kind, ("model.norm",))
    if kind == "fp16":
        assert plugin.scaler is not None
        assert (plugin.scaler.growth_interval, plugin.scaler.scale) == (7, 32768.0)


def test_the_word_alone(tmp_path: Path) -> None:
    plugin = build_trainer(composed(tmp_path, "trainer.precision=fp16")).precision_plugin
    assert repr(plugin) == "MasterWeightPrecision('fp16')"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["precision=bf16", "+trainer.plugins=[{_target_: lit_pretrain.plugins.MasterWeightPrecision}]"],
            r"^trainer\.precision=bf16 and trainer\.plugins\[0\] \(MasterWeightPrecision\) both set the precision",
        ),
        (
            ["strategy=zero3", "+strategy.precision=fp16"],
            r"^trainer\.precision=32-true and strategy\.precision=fp16 both set the precision; remove one of them\.$",
        ),
    ],
)
def test_two_owners(overrides: list[str], words: str, tmp_path: Path) -> None:
    overrides = [o.removeprefix("+") if "trainer.plugins" in o else o for o in overrides]
    with pytest.raises(ConfigError, match=words):
        checks.check(composed(tmp_path, *overrides), multirun=False)


def test_float16_flag_on_a_cpu_names_the_way_out(tmp_path: Path) -> None:
    config = composed(tmp_path, "trainer.precision=16-mixed")
    with pytest.raises(ConfigError, match="use precision=fp16, which is real float16"):
        checks.check(config, multirun=False)


def test_a_setting_that_is_misspelt(tmp_path: Path) -> None:
    config = composed(tmp_path, "precision=fp16", "+precision.scaler.growth=2")
    with pytest.raises(ConfigError, match=r"^precision\.scaler\.growth is not a setting of"):
        build_trainer(config)


def test_words() -> None:
    node = {"_target_": "lit_pretrain.plugins.MasterWeightPrecision"}
    values = ("32-true", node, node | {"precision": "fp16"}, node | {"precision": "fp32"})
    assert [precision_word(v) for v in values] == ["32-true", "bf16", "fp16", "32-true"]
