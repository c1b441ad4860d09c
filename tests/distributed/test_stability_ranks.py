"""Trouble that one rank has, told by all of them; and counts that are the same on each."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lit_pretrain.callbacks import ChinchillaBudget, LossSpikeRollback, NonFiniteGuard, RunCounters
from lit_pretrain.spikes import MeanRule
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support import parity, plain

UPDATES = 12


class Line(pl.LightningModule):
    """Three numbers a row; a rank's rows begin with its number."""

    def __init__(self, poison: dict[int, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line = nn.Linear(3, 1)
        self.poison = poison or {}  # batch: the rank that has it

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self.line(batch), batch.sum(1, keepdim=True))
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        return loss * float("nan") if self.poison.get(number) == self.global_rank else loss

    def train_dataloader(self) -> Any:
        g = torch.Generator().manual_seed(3 + self.global_rank)
        return DataLoader([torch.randn(4, 3, generator=g) for _ in range(2 * UPDATES)], batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    folder: str,
    callbacks: list[Any],
    *,
    poison: dict[int, int] | None = None,
    path: Path | None = None,
    **settings: Any,
) -> pl.Trainer:
    module = Line(poison)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"max_steps": UPDATES} | settings),
    )
    trainer.fit(module, ckpt_path=path)
    return trainer


def said(folder: str, kind: str) -> str:
    """What this rank is told."""
    root, rank, path = Path(folder), int(os.environ["RANK"]), None
    settings: dict[str, Any] = {"ledger": root / "spikes.jsonl"}
    if kind == "ledger below a file":
        settings = {"ledger": root / "file" / "spikes.jsonl"}
    elif kind == "ledger is a pipe":
        settings = {"ledger": root / "pipe"}
    elif kind == "disk on rank 1":
        settings = {"disk": root / ("good" if rank == 0 else "file")}
    else:
        path = root / "half.ckpt"
        fit(folder, [LossSpikeRollback(**settings)], max_steps=3).save_checkpoint(path)
        (root / "spikes.jsonl").write_text('{"step": 4}\n')
    try:
        trainer = fit(folder, [LossSpikeRollback(**settings)], path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing, after {trainer.global_step} updates"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "ledger below a file",
            r"DataError: The skip ledger .*spikes\.jsonl could not be written \(.*file is no folder",
        ),
        ("ledger is a pipe", r"DataError: The skip ledger .*pipe could not be written \(it is no regular file\)"),
        ("damaged ledger", r"DataError: .*spikes\.jsonl, line 1: .* is no entry of a skip ledger .* Repair or remove"),
        ("disk on rank 1", r"ConfigError: rollback\.disk: snapshots cannot be written to .*file.rank-00001 \("),
    ],
)
def test_every_rank_says_what_one_has_found(tmp_path: Path, ranks: Any, kind: str, message: str) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    first, second = ranks(2, said, str(tmp_path), kind)
    assert first == second
    assert re.match(message, first), first
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "pipe").is_fifo()  # not set aside either
    assert kind == "damaged ledger" or not (tmp_path / "spikes.jsonl").exists()


def counted(folder: str) -> dict[str, Any]:
    """Rank 0 counts 5 tokens a batch, rank 1 seven: 24 an update of two batches."""
    rank = int(os.environ["RANK"])
    counters = RunCounters(tokens_per_batch=lambda batch: torch.tensor(5 + 2 * rank))
    budget = ChinchillaBudget(None, max_tokens=24 * 5 - 1)
    trainer = fit(folder, [counters, budget], accumulate_grad_batches=2)
    return {"tokens": counters.tokens, "read": counters.tokens_read, "step": trainer.global_step}


def test_tokens_that_differ_between_ranks_are_added_up(tmp_path: Path, ranks: Any) -> None:
    assert ranks(2, counted, str(tmp_path)) == [{"tokens": 120.0, "read": 120.0, "step": 5}] * 2


def miscounted(folder: str) -> str:
    rank = int(os.environ["RANK"])
    try:
        fit(folder, [RunCounters(tokens_per_batch=lambda batch: 5 if rank == 0 else 1.5)])  # type: ignore[arg-type,return-value]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_count_that_is_none_on_one_rank(tmp_path: Path, ranks: Any) -> None:
    told = ranks(2, miscounted, str(tmp_path))
    assert told[0] == told[1]
    assert told[0].startswith("ConfigError: tokens_per_batch gave 1.5 for a batch, and has to give a whole number")


def guarded(folder: str, poison: dict[int, int], every: int) -> dict[str, Any]:
    guard = NonFiniteGuard(action="report")
    back = LossSpikeRollback(MeanRule(window=10, min_steps=3), every_n_steps=every)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(folder, [guard, back], poison=poison)
    return {"reports": guard.reports, "ledger": [entry.spike for entry in back.ledger.entries]}


@pytest.mark.parametrize(("every", "second"), [(1, 8), (3, 7), (5, 3)])
def test_a_report_beside_a_rollback_names_the_one_that_was_bad(
    tmp_path: Path, ranks: Any, every: int, second: int
) -> None:
    """Batch 5 on rank 1 in update 6, then batch 9 on rank 0; what update that is depends on the snapshot restored.

    Every 3 updates update 6 is looked at before the next is made, else one later, when 7 is made.
    """
    for got in ranks(2, guarded, str(tmp_path), {5: 1, 9: 0}, every):
        assert got["ledger"] == [6, second]
        first, last = got["reports"]
        assert first.startswith("Update 6: the loss is nan on rank 1 (batches [5])")
        assert last.startswith(f"Update {second}: the loss is nan on rank 0 (batches [9])")


def shared(size: int) -> dict[str, Any]:
    """Pairs of ranks read the same batches; the second pair of four counts one token more in each."""
    run = plain.trainer(HybridParallelStrategy(tensor_parallel_size=2), devices=size, max_steps=1)
    counters = RunCounters(tokens_per_batch=lambda batch: 100 + run.strategy.distributed_sampler_kwargs["rank"])
    run.callbacks.append(counters)  # type: ignore[attr-defined]
    module = parity.Wide(parity.config("gpt2", tied=True), optimizer=parity.adamw, seed=5)
    run.fit(module, DataLoader(parity.global_batches(updates=1, rows=4), batch_size=None))
    return {"tokens": counters.tokens, "pairs": run.strategy.distributed_sampler_kwargs["num_replicas"]}


def test_ranks_that_share_a_batch_count_once(ranks: Any) -> None:
    assert ranks(2, shared, 2) == [{"tokens": 100.0, "pairs": 1}] * 2
    assert ranks(4, shared, 4) == [{"tokens": 201.0, "pairs": 2}] * 4
