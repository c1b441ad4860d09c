"""Who brought a NaN in, and where: found without help in gradients, activations and losses."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import GradientClipping, NonFiniteGuard
from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import MasterWeightPrecision


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


def fit(module: Net, guard: Any, *others: Any, named: bool = True, plugins: Any = None) -> None:
    batches = [{"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), "index": i} for i in range(8)]
    if not named:
        batches = [{"x": batch["x"]} for batch in batches]
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*others, guard],
        plugins=plugins,
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
    assert guard.reports[0].startswith("Update 4: ")
    assert sum("gradients are not finite" in str(w.message) for w in recwarn) == 2


class ManySteps(Net):
    """Six steps on every batch, as critics are trained; the second of them has a loss that is not finite."""

    def __init__(self, *, at: int) -> None:
        super().__init__(at=at, how="none")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for step in range(6):
            optimizer.zero_grad()
            loss = self.third(batch["x"]).square().mean()
            self.manual_backward(loss * float("nan") if (batch_idx, step) == (self.at, 1) else loss)
            optimizer.step()


def test_every_step_on_a_batch_is_placed() -> None:
    """The 14th: two batches of six, and two."""
    with pytest.raises(FloatingPointError, match=r"Update 14: the loss is nan on rank 0 \(batches \[2\]\)"):
        fit(ManySteps(at=2), NonFiniteGuard())


def test_another_fit_names_nothing_of_the_last() -> None:
    class Halt(pl.Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            raise KeyError("halt")

    guard = NonFiniteGuard()
    with pytest.raises(KeyError, match="halt"):  # before the guard, which keeps what it has heard of batch 0
        fit(Net(at=99, how="none"), guard, Halt())
    with pytest.raises(FloatingPointError, match=r"\(batches \[0\]\)"):
        fit(Net(at=0, how="activation"), guard)


class Passes(Net):
    """Batch 2 gives no loss, and under our loss scaler no step of the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss * float("nan") if batch_idx == 3 else loss


def test_a_batch_without_a_step_is_not_named_with_the_next() -> None:
    with pytest.raises(FloatingPointError, match=r"the loss is nan on rank 0 \(batches \[3\]\)"):
        fit(Passes(at=99, how="none"), NonFiniteGuard(), plugins=MasterWeightPrecision("fp16"))


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
