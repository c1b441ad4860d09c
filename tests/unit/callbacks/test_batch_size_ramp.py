"""The ramp's updates against a loop by hand over the same microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import (
    BatchSizeRamp,
    ExactResume,
    LossSpikeRollback,
    RunCounters,
    WarmupConstant,
    sort_callbacks,
)
from lit_pretrain.errors import ConfigError

BATCHES = torch.randn(40, 4, 3, generator=torch.Generator().manual_seed(5))


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.line(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def by_hand(sizes: list[int]) -> torch.Tensor:
    """Updates of so many microbatches each, one after the other."""
    torch.manual_seed(0)
    line, at = nn.Linear(3, 1), 0
    for size in sizes:
        loss = sum((line(BATCHES[at + i]) - 1).square().mean() for i in range(size)) / size
        line.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in line.parameters():
                p -= 0.05 * p.grad
        at += size
    return line.weight.detach().clone()


class Data(pl.LightningDataModule):
    tokens_per_update = 48  # 4 microbatches of 12

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def fit(folder: Path, ramp: Any, *callbacks: Any, steps: int, ckpt_path: Any = None) -> tuple[pl.Trainer, Line]:
    module = Line()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=4,
        callbacks=sort_callbacks([ramp, *callbacks]),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    return trainer, module


# Wanted after 0, 1, 2 ... updates: 1, 1, 2, 3, 4: a third begins only where three divide the place, which is never
# before four are wanted. By hand: places 0, 1, 2, 4, 6 -> at place 2 two begin, at 4 and at 6 three cannot or four are
# due; four begin at 8.
SIZES = [1, 1, 2, 2, 2, 4, 4]


def test_updates_are_those_of_the_loop_by_hand(tmp_path: Path) -> None:
    counters = RunCounters()
    trainer, module = fit(tmp_path, BatchSizeRamp(start_share=0.25, updates=4), counters, steps=7)
    assert torch.allclose(module.line.weight, by_hand(SIZES), atol=1e-6)
    assert counters.tokens == 12 * sum(SIZES)
    assert counters.updates == 7
    assert trainer.accumulate_grad_batches == 4  # as it was


def test_a_schedule_in_tokens_counts_those_that_were_used(tmp_path: Path) -> None:
    schedule = WarmupConstant(warmup_tokens=24)
    seen: list[float] = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    fit(tmp_path, BatchSizeRamp(start_share=0.25, updates=4), schedule, Rates(), steps=7)
    assert schedule.applied_tokens == 12 * sum(SIZES)
    assert seen == pytest.approx([0.025, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])  # 12 of 24 tokens, then all


def test_a_resumed_ramp_goes_on(tmp_path: Path) -> None:
    first, _ = fit(tmp_path, BatchSizeRamp(start_share=0.25, updates=4), ExactResume(), steps=4)
    first.save_checkpoint(tmp_path / "four.ckpt")
    _, module = fit(
        tmp_path, BatchSizeRamp(start_share=0.25, updates=4), ExactResume(), steps=7, ckpt_path=tmp_path / "four.ckpt"
    )
    assert torch.allclose(module.line.weight, by_hand(SIZES), atol=1e-6)


def test_a_rollback_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BatchSizeRamp and LossSpikeRollback cannot"):
        fit(tmp_path, BatchSizeRamp(updates=4), LossSpikeRollback(), steps=1)


@pytest.mark.parametrize(("name", "value"), [("start_share", 0.0), ("start_share", 1.0), ("updates", 0)])
def test_impossible_settings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"ramp\.{name}={value}"):
        BatchSizeRamp(**({"updates": 4} | {name: value}))
