"""Every option of every group, and every experiment, composes, is constructed and trains."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lit_pretrain.cli import checks
from lit_pretrain.cli.train import save
from lit_pretrain.instantiate import build
from lit_pretrain.instantiate.job import train
from lit_pretrain.models import GPT
from lit_pretrain.planning import count_parameters
from lit_pretrain.specs import GPTConfig
from tests.conf import tiny

CONF = Path(__file__).parents[2] / "conf"


def options(*, without: tuple[str, ...] = ()) -> list[str]:
    return sorted(f"{p.parent.name}={p.stem}" for p in CONF.glob("*/*.yaml") if p.parent.name not in without)


@contextmanager
def one_rank() -> Iterator[None]:
    """Lightning leaves a process group and its variables behind."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for key in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
            del os.environ[key]


def fast_dev_run(run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    config = tiny.composed(run_dir, [*overrides, "++trainer.fast_dev_run=4"])
    checks.check(config, multirun=False)
    save(config, run_dir / "resolved.yaml")
    with one_rank():
        return train(config)


def test_there_are_options_to_test() -> None:
    found = options()
    groups = {o.split("=")[0] for o in found}
    assert groups >= {"callbacks", "data", "debug", "experiment", "logger", "optimizer", "precision"}
    assert groups >= {"schedule", "strategy", "trainer"}
    assert len(found) > 25


@pytest.mark.parametrize("option", options(without=("data",)))
def test_option_trains(option: str, tmp_path: Path, shards: list[str]) -> None:
    shrink = [s for s in tiny.SHRINK if not (option == "strategy=single" and s.startswith("trainer.devices"))]
    result = fast_dev_run(tmp_path, [option, *shards, *shrink])
    assert result["steps"] == 2
    assert math.isfinite(result["metrics"]["val/loss"])


@pytest.mark.parametrize("path", sorted(CONF.glob("model/*.yaml")), ids=lambda path: path.stem)
def test_every_model_lists_every_setting(path: Path) -> None:
    """Then any of them can be set without a plus; what an option leaves out has the default of the class."""
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        model = compose("train", [f"model={path.stem}", "model.qk_norm=true"]).model
    defaults = {f.name: f.default for f in dataclasses.fields(GPTConfig)}
    assert set(model) == {"_target_", *defaults}
    assert model.qk_norm is True
    if path.stem == "gpt":
        missing = {name for name in defaults if OmegaConf.is_missing(model, name)}
        assert missing == {name for name, default in defaults.items() if default is dataclasses.MISSING}
        assert {name: model[name] for name in defaults if name not in missing} == {
            name: default for name, default in defaults.items() if name not in missing
        } | {"qk_norm": True}


def test_data_shards_needs_its_sources(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="sources"):
        tiny.composed(tmp_path, ["data=shards", *tiny.SHRINK])


@pytest.mark.slow
def test_data_default_trains(tmp_path: Path) -> None:
    shrink = [s for s in tiny.SHRINK if "vocab_size" not in s]
    overrides = ["data=default", *shrink, "model.vocab_size=512", "data.corpus.max_bytes=300000"]
    result = fast_dev_run(tmp_path, [*overrides, f"cache_dir='{tmp_path / 'cache'}'"])
    assert math.isfinite(result["metrics"]["val/bits_per_byte"])


def models_and_experiments() -> list[str]:
    found = [o for o in options() if o.startswith(("model=", "experiment="))]
    return [o for o in found if o != "model=gpt"]  # it has no shape of its own


@pytest.mark.parametrize("option", models_and_experiments())
def test_full_size_has_the_parameters_it_should(option: str, tmp_path: Path, shards: list[str]) -> None:
    """On the meta device: no memory, the real shapes."""
    config = tiny.composed(tmp_path, [option, *shards, *(["length.steps=1"] if "model=" in option else [])])
    architecture = build(config["model"], "model")
    with torch.device("meta"):
        model = GPT(architecture)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(architecture).total


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        # 0.5M tokens per update (512 x 1,024), 10B tokens: 10e9 / 524,288 = 19,073.5 updates.
        ("gpt2_124m", {"tokens_per_update": 524_288, "max_steps": 19_074, "lr": 6e-4, "warmup_steps": 700}),
        # 4M tokens per update (2,048 x 2,048), 1T tokens: 1e12 / 4,194,304 = 238,418.6 updates.
        ("llama_7b", {"tokens_per_update": 4_194_304, "max_steps": 238_419, "lr": 3e-4, "warmup_steps": 2000}),
    ],
)
def test_published_recipes(experiment: str, expected: dict[str, Any], tmp_path: Path, shards: list[str]) -> None:
    config = tiny.composed(tmp_path, [f"experiment={experiment}", *shards, "trainer.accelerator=cpu"])
    found = {
        "tokens_per_update": config["batch"]["tokens_per_update"],
        "max_steps": config["trainer"]["max_steps"],
        "lr": config["optimizer"]["lr"],
        "warmup_steps": config["schedule"]["warmup_steps"],
    }
    assert found == expected
