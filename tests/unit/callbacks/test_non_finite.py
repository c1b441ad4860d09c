"""Who brought a NaN in, and where: found without help in gradients, activations and losses."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import GradientClipping, NonFiniteGuard
from lit_pretrain.errors import ConfigError


class Poisoned(torch.autograd.Function):
    """Finite forward, NaN backward: where a wrong kernel or an overflow would sit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


class Net(pl.LightningModule):
    """Three layers; at one update something breaks in or behind the second."""

    def __init__(self, *, at: int, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.at, self.how = at, how

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        breaks = self.trainer.global_step == self.at
        x = self.first(batch["x"])
        if breaks and self.how == "activation":
            x = x * float("inf")
        x = self.second(x)
        if breaks and self.how == "backward":
            x = Poisoned.apply(x)
        return self.third(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module: Net, guard: Any, *others: Any, named: bool = True) -> None:
    batches = [{"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), "index": i} for i in range(8)]
    if not named:
        batches = [{"x": batch["x"]} for batch in batches]
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*others, guard],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))


def test_a_backward_pass_is_placed_by_the_layer_nearest_the_output() -> None:
    """The third layer's gradients are finite, those of the second and first are not."""
    with pytest.raises(
        FloatingPointError, match=r"4 of 6 gradients .* rank 0, nearest the output that of second\.bias"
    ):
        fit(Net(at=3, how="backward"), NonFiniteGuard())


def test_an_activation_is_placed_by_the_first_layer_that_puts_it_out() -> None:
    with pytest.raises(FloatingPointError, match=r"rank 0 \(batches \[3\]\); on rank 0 the first layer .* is second"):
        fit(Net(at=3, how="activation"), NonFiniteGuard(activations=True))


def test_batches_without_a_name_are_counted() -> None:
    with pytest.raises(FloatingPointError, match=r"rank 0 \(batches \[3\]\); on rank 0 the first layer .* is second"):
        fit(Net(at=3, how="activation"), NonFiniteGuard(activations=True), named=False)


def test_a_report_lets_the_run_go_on(recwarn: pytest.WarningsRecorder) -> None:
    guard = NonFiniteGuard(action="report", max_reports=2)
    fit(Net(at=3, how="backward"), guard)
    assert len(guard.reports) == 2  # the weights are lost, and the third report is not made
    assert "Up to update 4" in guard.reports[0]
    assert sum("gradients are not finite" in str(w.message) for w in recwarn) == 2


def test_a_healthy_run_says_nothing() -> None:
    guard = NonFiniteGuard(activations=True)
    fit(Net(at=99, how="none"), guard)
    assert guard.reports == []


def test_clipping_may_not_decide_too() -> None:
    with pytest.raises(ConfigError, match=r"GradientClipping\(non_finite='error'\) would both"):
        fit(Net(at=99, how="none"), NonFiniteGuard(), GradientClipping(1.0))


@pytest.mark.parametrize(("name", "value"), [("action", "look"), ("max_reports", 0), ("max_reports", 1.5)])
def test_impossible_settings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"non_finite\.{name}={value!r}"):
        NonFiniteGuard(**{name: value})
