"""Schedulers that watch a metric, over rollbacks and kills; the oracle is a bare loop of torch, or the whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_pretrain.errors import RankError
from tests.support import shuffled


class ByStep(shuffled.Net):
    """A plateau that looks at the loss of every update."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        plateau = ReduceLROnPlateau(optimizer, factor=0.9, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "loss"},
        }


@pytest.mark.parametrize("mode", ["rollback", "skip"])
@pytest.mark.parametrize("poison", [5, 12, 13, 15])
def test_a_plateau_by_steps_never_hears_of_the_spike(tmp_path: Path, poison: int, mode: Any) -> None:
    plateaus: dict[int, ReduceLROnPlateau] = {}

    def update(net: Any, optimizer: torch.optim.Optimizer, window: list[Any]) -> None:
        plateau = plateaus.setdefault(id(optimizer), ReduceLROnPlateau(optimizer, factor=0.9, patience=1))
        rate = optimizer.param_groups[0]["lr"] = plateau.get_last_lr()[0]  # the loop's own schedule is not this one's
        optimizer.zero_grad()
        loss = mse_loss(net.layers(window[0][0]), window[0][1])
        loss.backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate
        plateau.step(loss.detach())

    got = shuffled.train(str(tmp_path), poison=[poison], kind=ByStep, mode=mode)
    assert len(got["ledger"]) == 1
    want = shuffled.never_saw(got["ledger"], kind=ByStep, update=update)
    assert [name for name in ("weights", "random") if got[name] != want[name]] == []


class ByEpoch(shuffled.Net):
    """A plateau that looks at the validation of every epoch; its rate falls at each, so that one step is seen."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def by_epoch(folder: str, kill: tuple[str, int] | None) -> dict[str, Any]:
    return shuffled.train(
        folder, poison=[], dropout=0.3, save_every=4, kill=kill, kind=ByEpoch, held=shuffled.loader(), mode="warn"
    )


@pytest.mark.parametrize("count", [6, 11, 20])
def test_a_plateau_by_epochs_steps_in_the_epoch_of_a_resume_too(tmp_path: Path, ranks: Any, count: int) -> None:
    """No spike in it: this is ExactResume's part."""
    (whole,) = ranks(1, by_epoch, str(tmp_path / "whole"), None)
    assert whole["rate"] < 0.003
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(1, by_epoch, str(tmp_path / "killed"), ("on_before_optimizer_step", count))
    (got,) = ranks(1, by_epoch, str(tmp_path / "killed"), None)
    assert [name for name in ("weights", "rate", "random") if got[name] != whole[name]] == []


class Momentum(shuffled.Net):
    """A slow copy of some weights that ``training_step`` moves, as BYOL and MoCo have; it counts its moves."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.slow = nn.Parameter(torch.zeros(4_000_000), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.slow.add_(1.0)
        return super().training_step(batch, batch_idx)


def test_a_slow_copy_goes_back_whole(tmp_path: Path) -> None:
    """It has moved once for each update that was not taken back."""
    modules: list[Any] = []

    class Kept(Momentum):
        def on_train_end(self) -> None:
            modules.append(self)

    got = shuffled.train(str(tmp_path), poison=[12], kind=Kept)
    assert len(got["ledger"]) == 1
    assert modules[0].slow.unique().tolist() == [float(got["step"])]
