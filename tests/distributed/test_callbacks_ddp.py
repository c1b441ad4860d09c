"""Callbacks over two data-parallel ranks, against one process that sees both halves of every batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lit_pretrain.callbacks import GradientClipping, ThroughputMonitor, WarmupCosine
from lit_pretrain.distributed import global_norm
from tests.unit.callbacks.tiny import Tiny, trainer

UPDATES, ROWS, MAX_NORM, LR = 6, 8, 1.9, 0.1


def global_batches():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(UPDATES, ROWS, 3, generator=g, dtype=torch.float64)
    return [(x[i], x[i].sum(1, keepdim=True)) for i in range(UPDATES)]


class Half(Tiny):
    """Each rank reads its rows; rank 1 alone can be poisoned."""

    poisoned_update = -1

    def train_dataloader(self):
        rank, n = self.trainer.global_rank, ROWS // self.trainer.world_size
        return torch.utils.data.DataLoader(
            [(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]) for x, y in global_batches()],
            batch_size=None,
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ((self(x) - y) ** 2).mean()
        return loss * float("nan") if self.global_rank == 1 and batch_idx == self.poisoned_update else loss


class Norms(Callback):
    """Norm of the gradients before and after clipping, in float64."""

    def __init__(self):
        self.values = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.values.append(global_norm(grads).item())


def fit(tmp_path, poisoned_update, non_finite):
    model = Half(lr=LR).double()
    model.poisoned_update = poisoned_update
    before, after = Norms(), Norms()
    schedule, monitor = WarmupCosine(warmup_steps=2, total_steps=6), ThroughputMonitor(tokens_per_batch=10)
    clipping = GradientClipping(MAX_NORM, non_finite=non_finite)
    run = trainer(
        tmp_path, schedule, before, clipping, after, monitor, devices=2, strategy="ddp", precision="64-true",
        use_distributed_sampler=False,
    )  # fmt: skip
    error = None
    try:
        run.fit(model)
    except FloatingPointError as e:
        error = str(e)
    return {
        "before": before.values,
        "after": after.values,
        "weights": [p.detach() for p in model.parameters()],
        "skipped": clipping.skipped_updates,
        "applied": schedule.applied_updates,
        "tokens": monitor.tokens,
        "error": error,
    }


def one_process(skip=None):
    """A loop without Lightning, torch's clipping or data parallelism."""
    model, before, after, done = Tiny().double(), [], [], 0
    rates = [0.5, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5))]
    for i, (x, y) in enumerate(global_batches()):
        if i == skip:
            continue
        model.zero_grad()
        ((model.net(x) - y) ** 2).mean().backward()
        grads = [p.grad for p in model.parameters()]
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        scale = min(1.0, MAX_NORM / (norm + 1e-6))  # torch's documented rule
        before.append(norm)
        after.append(norm * scale)
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= LR * rates[done] * scale * g
        done += 1
    return before, after, list(model.parameters())


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_norm_and_clipped_weights_equal_one_process(ranks, tmp_path):
    results = ranks(2, fit, tmp_path, -1, "error")
    before, after, weights = one_process()
    assert any(n > MAX_NORM for n in before)
    assert any(n < MAX_NORM for n in before)
    for result in results:
        assert result["before"] == pytest.approx(before, rel=1e-12)
        assert result["after"] == pytest.approx(after, rel=1e-12)
        assert result["tokens"] == 2 * 10 * UPDATES
        for p, q in zip(result["weights"], weights, strict=True):
            close(p, q.detach())


def test_a_nan_on_one_rank_is_skipped_by_both(ranks, tmp_path):
    results = ranks(2, fit, tmp_path, 2, "skip")
    _, _, weights = one_process(skip=2)
    for result in results:
        assert result["skipped"] == 1
        assert result["applied"] == UPDATES - 1
        assert result["error"] is None
        for p, q in zip(result["weights"], weights, strict=True):
            close(p, q.detach())


def test_a_nan_on_one_rank_stops_both_at_the_same_update(ranks, tmp_path):
    errors = [result["error"] for result in ranks(2, fit, tmp_path, 2, "error")]
    assert errors[0] == errors[1]
    assert errors[0].startswith("Update 2: the gradient of net.0.weight is not finite")


def sharded_norms():
    """Norms of the same values laid out in every way, and clipped values gathered again."""
    torch.manual_seed(0)
    flat, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    full = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 4, 1, 6, 2)]  # 5 and 1 rows do not divide by 2
    laid_out = [
        distribute_tensor(full[0], flat, [Shard(0)]),
        distribute_tensor(full[1], flat, [Replicate()]),
        distribute_tensor(full[2], grid, [Replicate(), Shard(0)]),
        DTensor.from_local(full[3] * (dist.get_rank() + 1) / 3, flat, [Partial()]),
        full[4],
    ]
    parameters = []
    for value in laid_out:
        p = torch.nn.Parameter(torch.zeros_like(value))
        p.grad = value
        parameters.append(p)
    norm = global_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters[:1], 0.5, norm)
    clipped = parameters[0].grad.full_tensor()
    return norm, math.sqrt(sum(float((f**2).sum()) for f in full)), clipped, full[0]


def test_sharded_gradients_count_once(ranks):
    for norm, want, clipped, full in ranks(2, sharded_norms, init=True):
        assert norm.item() == pytest.approx(want, rel=1e-14)
        close(clipped, full * 0.5 / (want + 1e-6))
