"""Modules whose updates are not one loss, one backward pass and one step; the oracle is a bare loop of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import mse_loss

from lit_pretrain.callbacks import LossSpikeRollback
from lit_pretrain.errors import ConfigError
from tests.support import shuffled

MODES = ["rollback", "skip"]
COMPARED = ("weights", "random")


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return [name for name in COMPARED if got[name] != want[name]]


class Silent(shuffled.Net):
    """Finds nothing to learn in some batches."""

    QUIET = (3, 4, 10, 13)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.seen[-1][0] in self.QUIET else loss


@pytest.mark.parametrize("mode", MODES)
def test_steps_without_a_loss(tmp_path: Path, mode: Any) -> None:
    got = shuffled.train(str(tmp_path), poison=[12], kind=Silent, mode=mode)
    assert len(got["ledger"]) == 1
    quiet = [(0, at, at + 1) for at in Silent.QUIET]
    assert differing(got, shuffled.never_saw([*got["ledger"], *quiet])) == []


class Twice(shuffled.Net):
    """Two steps on the gradients of one backward pass."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer()


def twice(net: Any, optimizer: torch.optim.Optimizer, window: list[Any]) -> None:
    optimizer.zero_grad()
    mse_loss(net.layers(window[0][0]), window[0][1]).backward()
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_on_the_same_gradients(tmp_path: Path, mode: Any) -> None:
    """The oracle steps no schedule: its rate is put back before every update."""

    def update(net: Any, optimizer: torch.optim.Optimizer, window: list[Any]) -> None:
        optimizer.param_groups[0]["lr"] = 0.003
        twice(net, optimizer, window)

    got = shuffled.train(str(tmp_path), poison=[12], kind=Twice, mode=mode)
    assert len(got["ledger"]) == 1
    assert differing(got, shuffled.never_saw(got["ledger"], update=update)) == []


class SecondOrder(shuffled.Net):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.02, max_iter=3, history_size=4)


def second_order(net: Any, optimizer: torch.optim.Optimizer, window: list[Any]) -> None:
    def closure() -> torch.Tensor:
        loss = mse_loss(net.layers(window[0][0]), window[0][1])
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_lbfgs_goes_back(tmp_path: Path) -> None:
    """Its state holds lists of tensors."""
    got = shuffled.train(str(tmp_path), poison=[12], kind=SecondOrder)
    assert got["ledger"] != []
    assert differing(got, shuffled.never_saw(got["ledger"], kind=SecondOrder, update=second_order)) == []


class Two(shuffled.Net):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.optimizer(), self.optimizer()]


class Unseen(shuffled.Net):
    """Its backward pass is its own business."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SecondOrder, r"judges the loss of an update before it is made, and LBFGS evaluates several"),
        (Two, r"drops the update of one optimizer, and Two\.configure_optimizers returned 2; use mode='rollback'"),
        (Unseen, r"Unseen\.training_step returns no loss to watch; set rollback\.monitor"),
    ],
)
def test_what_skip_cannot_judge_is_refused(tmp_path: Path, kind: Any, message: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        callbacks=[LossSpikeRollback(mode="skip")],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(kind(), shuffled.loader())


class TakesBatches(shuffled.Net):
    """Asks the loader's iterator for its batch."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_module_that_takes_batches_itself_is_warned_alone(tmp_path: Path) -> None:
    told: list[Any] = []
    got = shuffled.train(str(tmp_path), poison=[12], kind=TakesBatches, mode="warn", alarm=told.append)
    assert [facts["update"] for facts in told][:1] == [13]
    assert got["ledger"] == []
    with pytest.raises(ConfigError, match=r"takes batches by itself, .* or use mode=warn"):
        shuffled.train(str(tmp_path / "again"), poison=[12], kind=TakesBatches)
