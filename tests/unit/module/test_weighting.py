"""Accumulated gradients equal those of one big batch, with masked targets and with a short last window."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from lit_pretrain.module import TargetWeighting


class Masked(pl.LightningModule):
    """A foreign module that declares its count; records gradients and logged losses."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.lr = lr
        g = torch.Generator().manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(5, 7, generator=g, dtype=torch.float64))
        self.weighting = TargetWeighting()
        self.gradients, self.losses = [], []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(x @ self.w, y, ignore_index=-100, reduction="sum")
        return self.weighting.scale(loss, (y >= 0).sum(), nominal=y.numel())

    def on_after_backward(self):
        loss = self.weighting.finish(self)
        if loss is not None:
            self.losses.append(float(loss))

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.w.grad.clone())

    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=self.lr)


def batches(rows, *, masked=0.3, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=g, dtype=torch.float64)
    y = torch.randint(0, 7, (rows,), generator=g)
    y[torch.rand(rows, generator=g) < masked] = -100
    return x, y


def big_batches(x, y, sizes, lr=0.1):
    """Oracle: plain torch on the whole global batches."""
    w = Masked().w.detach().clone().requires_grad_()
    gradients, losses, start = [], [], 0
    for n in sizes:
        loss = F.cross_entropy(x[start : start + n] @ w, y[start : start + n], ignore_index=-100)
        (grad,) = torch.autograd.grad(loss, w)
        gradients.append(grad)
        losses.append(loss.item())
        with torch.no_grad():
            w -= lr * grad
        start += n
    return gradients, losses, w


def fit(module, x, y, *, micro, accumulate, **kwargs):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=micro)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(module, loader)
    return module


@pytest.mark.parametrize(
    ("rows", "micro", "accumulate", "sizes"),
    [
        (24, 4, 1, [4] * 6),
        (24, 4, 3, [12, 12]),
        (20, 4, 3, [12, 8]),  # the last window is short
        (22, 4, 3, [12, 10]),  # and its last microbatch too
    ],
)
def test_equals_one_big_batch(rows, micro, accumulate, sizes):
    x, y = batches(rows)
    module = fit(Masked(), x, y, micro=micro, accumulate=accumulate)
    gradients, losses, w = big_batches(x, y, sizes)
    assert len(module.gradients) == len(sizes)
    for got, want in zip(module.gradients, gradients, strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max())
    assert module.losses == pytest.approx(losses, rel=1e-12)
    assert (module.w - w).abs().max() <= 1e-12


def test_fully_masked_window_moves_nothing():
    x, y = batches(8)
    y[:] = -100
    module = fit(Masked(), x, y, micro=4, accumulate=2)
    assert torch.equal(module.gradients[0], torch.zeros(5, 7, dtype=torch.float64))
    assert torch.equal(module.w, Masked().w)


def test_fully_masked_microbatch_adds_nothing():
    x, y = batches(8, masked=0.0)
    y[:4] = -100
    module = fit(Masked(), x, y, micro=4, accumulate=2)
    gradients, _, _ = big_batches(x, y, [8])
    assert (module.gradients[0] - gradients[0]).abs().max() <= 1e-12


def test_clipping_sees_true_gradients():
    x, y = batches(12)
    limit = 1e-3
    module = fit(Masked(lr=1.0), x, y, micro=4, accumulate=3, gradient_clip_val=limit)
    gradients, _, _ = big_batches(x, y, [12])
    want = gradients[0] * limit / (gradients[0].norm() + 1e-6)
    assert torch.allclose(Masked().w - module.w, want, atol=1e-12)
