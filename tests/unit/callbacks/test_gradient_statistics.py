"""Norms and ratios against autograd by hand; the noise scale against a distribution whose noise is known."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import GradientStatistics
from lit_pretrain.callbacks.gradient_statistics import group_of, noise
from lit_pretrain.errors import ConfigError


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(pl.Callback):
    """Norms straight from the gradients, weights before and after."""

    order = 1000

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []
        self.ratios: list[dict[str, float]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parts = {"blocks.0": pl_module.blocks[0], "blocks.1": pl_module.blocks[1], "head": pl_module.head}
        flat = {k: torch.cat([p.grad.flatten() for p in m.parameters()]) for k, m in parts.items()}
        whole = {k: torch.cat([p.detach().flatten() for p in m.parameters()]) for k, m in parts.items()}
        self.norms.append({k: float(g.norm()) for k, g in flat.items()})
        self.ratios.append({k: float(0.1 * flat[k].norm() / whole[k].norm()) for k in parts})  # SGD: lr x gradient

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("grads/")})


def fit(*callbacks: Any, accumulate: int = 1) -> None:
    data = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4))


def test_norms_and_ratios_of_the_measured_update() -> None:
    by_hand = ByHand()
    fit(GradientStatistics(every_n_steps=3), by_hand)
    assert by_hand.logged[1] == {}  # nothing before the third update
    assert len(by_hand.norms) == 8
    for update in (2, 5):
        got = by_hand.logged[update]
        for name, value in by_hand.norms[update].items():
            assert got[f"grads/norm/{name}"] == pytest.approx(value, rel=1e-6)
        for name, value in by_hand.ratios[update].items():
            assert got[f"grads/update_ratio/{name}"] == pytest.approx(value, rel=1e-4)


def test_the_first_microbatch_against_the_update() -> None:
    """By hand from the gradients of both: 4 rows against 16."""
    found: dict[str, float] = {}

    class Both(pl.Callback):
        first: torch.Tensor | None = None

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            g = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
            if self.first is None:
                self.first = 4 * g.clone()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 0:
                g = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
                small, large = float(self.first.square().sum()), float(g.square().sum())
                true = (16 * large - 4 * small) / 12
                found["scale"] = max(0.0, (small - large) / (1 / 4 - 1 / 16)) / true

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1 and "grads/noise_scale" in trainer.callback_metrics:
                found.setdefault("logged", float(trainer.callback_metrics["grads/noise_scale"]))

    fit(GradientStatistics(every_n_steps=1), Both(), accumulate=4)
    assert found["logged"] == pytest.approx(found["scale"], rel=1e-4)


def test_the_estimates_are_unbiased() -> None:
    """A gradient of length 2 with a noise of covariance trace 12: the means of many draws tell both."""
    g = torch.Generator().manual_seed(3)
    true = torch.full((4,), 1.0)  # |G|^2 = 4
    rows = true + torch.randn(20_000, 16, 4, generator=g) * 3**0.5  # trace 4 x 3
    small, large = rows[:, :4].mean(1).square().sum(1), rows.mean(1).square().sum(1)
    pairs = [noise(float(s), float(b), small_rows=4, large_rows=16) for s, b in zip(small, large, strict=True)]
    gradient, covariance = torch.tensor(pairs, dtype=torch.float64).mean(0).tolist()
    assert gradient == pytest.approx(4.0, abs=0.1)
    assert covariance == pytest.approx(12.0, abs=0.3)


def test_the_averages_survive_a_resume() -> None:
    first, second = GradientStatistics(), GradientStatistics()
    first._noise = (2.0, 6.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"noise": [2.0, 6.0]}


def test_groups() -> None:
    names = ("model.blocks.3.attn.q.weight", "model.wte.weight", "head.bias", "a.b.c.d")
    assert [group_of(name) for name in names] == ["model.blocks.3", "model.wte", "head", "a.b"]


@pytest.mark.parametrize(("name", "value"), [("every_n_steps", 0), ("smoothing", 0.0)])
def test_impossible_settings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"statistics\.{name}={value}"):
        GradientStatistics(**{name: value})
