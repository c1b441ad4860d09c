"""A snapshot puts back every tensor, in place, and whatever was born or lost since."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks._rollback.snapshot import Copier, Memory, Ring, Snapshot


class Net(pl.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.arange(3.0), persistent=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.line
        self.kind = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kept.add_(1.0)
        return self.norm(self.tied(batch)).square().mean() + self.line.weight.sum()

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        kinds = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.1),
            "fused": lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
            "tensor rate": lambda: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.1),
        }
        optimizer = kinds[self.kind]()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _halving(optimizer), "interval": "step"}}


def _halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3)


class AtSteps(pl.Callback):
    """Takes a snapshot before one update, keeps an independent copy, and puts the snapshot back after another."""

    def __init__(self, *, take: int, restore: int, path: Path | None = None) -> None:
        self.take, self.restore = take, restore
        self.snapshot, self.copier = Snapshot(Memory(path)), Copier()
        self.before: Any = None
        self.after: Any = None
        self.identities: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.take:
            self.snapshot.capture(trainer, self.copier)
            self.before = whole(trainer, pl_module)
            self.identities = [id(p) for p in pl_module.parameters()]

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.copier.wait()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.restore:
            self.changed = whole(trainer, pl_module)
            self.snapshot.restore(trainer, self.copier)
            self.after = whole(trainer, pl_module)
            assert self.identities == [id(p) for p in pl_module.parameters()]

    def on_train_end(self, *_: Any) -> None:
        self.copier.close()


def whole(trainer: Any, module: Any) -> dict[str, Any]:
    optimizer = trainer.optimizers[0]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(
        {
            "tensors": [t.detach() for t in (*module.parameters(), *module.buffers())],
            "states": [dict(optimizer.state.get(p, {})) for p in parameters],
            "rates": [float(g["lr"]) for g in optimizer.param_groups],
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def run(kind: str, watch: AtSteps, steps: int = 6) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(kind), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused", "tensor rate", "adagrad"])
@pytest.mark.parametrize("take", [0, 2])
def test_everything_comes_back(kind: str, take: int) -> None:
    watch = AtSteps(take=take, restore=5)
    run(kind, watch)
    assert not equal(watch.changed, watch.before)
    differing = [key for key in watch.before if not equal(watch.before[key], watch.after[key])]
    assert differing == []


def test_on_disk(tmp_path: Path) -> None:
    watch = AtSteps(take=2, restore=5, path=tmp_path / "rank" / "snapshot.bin")
    run("adamw", watch)
    assert equal(watch.before, watch.after)
    assert (tmp_path / "rank" / "snapshot.bin").stat().st_size == watch.snapshot.memory.size > 0
    watch.snapshot.memory.free()
    assert not (tmp_path / "rank" / "snapshot.bin").exists()


def test_memory_is_allocated_once() -> None:
    memory = Memory()
    tensors = [torch.zeros(3, 5), torch.zeros(7, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)]
    laid = memory.lay_out(tensors)
    assert [(t.shape, t.dtype) for t in laid] == [(t.shape, t.dtype) for t in tensors]
    assert memory.size == 64 * 3  # 60, 14 and 8 bytes, each rounded up to a cache line
    where = laid[0].data_ptr()
    assert memory.lay_out(tensors[:2])[0].data_ptr() == where
    laid[1].zero_()
    laid[0].fill_(1.0)
    assert float(laid[1].float().sum()) == 0.0  # they do not overlap


def test_a_ring_gives_up_the_oldest() -> None:
    class Entry:
        def __init__(self, snapshot: Snapshot, number: int) -> None:
            self.snapshot, self.number = snapshot, number

    class Take(pl.Callback):
        ring = Ring(keep=2)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.ring.take(trainer, lambda s: Entry(s, trainer.global_step))

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.ring.copier.wait()

    take = Take()
    run("adamw", take, steps=4)  # type: ignore[arg-type]
    assert [entry.number for entry in take.ring.taken] == [2, 3]
    size = take.ring.size
    take.ring.drop(lambda entry: entry.number == 3)
    assert [entry.number for entry in take.ring.taken] == [2]
    assert take.ring.size == size  # the memory is kept for the next
    take.ring.close()
    assert take.ring.size == 0
