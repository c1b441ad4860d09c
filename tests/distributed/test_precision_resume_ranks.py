"""The scaler and the masters of a sharded run, saved as a folder and taken up by new processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.module import GPTModule
from lit_pretrain.plugins import DynamicLossScaler, FolderCheckpointIO, MasterWeightPrecision
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support.parity import config
from tests.support.precision_runs import LAYERS, ROWS, Rule, Watch, sgd, whole

UPDATES, SAVED = 8, 4


class Part(Rule):
    """The batches from one on: Lightning alone would read the first ones again."""

    def __init__(self, start: int) -> None:
        super().__init__(updates=UPDATES, rows=ROWS, accumulate=1)
        self.batches = self.batches[start:] + self.batches[:start]


def train(layout: dict[str, Any], *, stop: int, save: str | None = None, resume: str | None = None) -> dict[str, Any]:
    scaler = DynamicLossScaler(initial_scale=64, growth_interval=2)
    watch = Watch(overflow=1, rank=1)
    module = GPTModule(config("gpt2", tied=True, layers=LAYERS), optimizer=sgd, seed=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridParallelStrategy(**layout, precision=MasterWeightPrecision("fp16", scaler=scaler)),
        plugins=[FolderCheckpointIO(background=False)],
        max_steps=stop,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(
        module, datamodule=Part(SAVED if resume else 0), ckpt_path=resume, weights_only=True if resume else None
    )
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "scales": watch.scales[-4:],
        "losses": watch.losses[-4:],
        "state": scaler.state_dict(),
        "weights": whole(module),
    }


def straight(layout: dict[str, Any]) -> dict[str, Any]:
    return train(layout, stop=UPDATES)


def first(layout: dict[str, Any], path: str) -> dict[str, Any]:
    return train(layout, stop=SAVED, save=path)


def second(layout: dict[str, Any], path: str) -> dict[str, Any]:
    return train(layout, stop=UPDATES, resume=path)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"stage": 2}, id="zero2"),
        pytest.param({"tensor_parallel_size": 2}, id="tp", marks=pytest.mark.slow),
    ],
)
def test_new_processes_go_on_exactly(ranks: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Update 1 is skipped before the save: 64, 32, then clean updates 2 and 3 double it again, and so on."""
    path = str(tmp_path / "saved")
    ranks(2, first, layout, path)
    for whole_run, resumed in zip(ranks(2, straight, layout), ranks(2, second, layout, path), strict=True):
        assert whole_run["scales"] == [64, 128, 128, 256]
        assert resumed["scales"] == whole_run["scales"]
        assert resumed["state"] == whole_run["state"]
        assert resumed["state"]["skipped_updates"] == 1
        assert resumed["losses"] == whole_run["losses"]
        for name, weight in whole_run["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name
