"""A rollback over the end of an epoch, in a project whose order of data is drawn from the global random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lit_pretrain.errors import RankError
from tests.support import shuffled

SPIKES: dict[str, dict[str, Any]] = {
    "in the middle": {"poison": [12]},
    "in an epoch's last batch": {"poison": [13]},
    "in an epoch's first batch": {"poison": [14]},
    "early in an epoch, from the one before": {"poison": [15]},
    "twice, and further back over the end": {"poison": [12, 16]},
    "in two epochs": {"poison": [6, 7, 21]},
    "in epochs of two batches": {"poison": [5], "rows": 8},
    "in a window of two": {"poison": [8], "accumulation": 2},
}


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return [name for name in ("weights", "rate", "random") if got[name] != want[name]]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("settings", SPIKES.values(), ids=SPIKES)
def test_it_is_a_run_that_never_saw_the_data(tmp_path: Path, settings: dict[str, Any], dropout: float) -> None:
    """The oracle is a bare loop of torch."""
    got = shuffled.train(str(tmp_path), dropout=dropout, **settings)
    assert got["ledger"] != []
    same = {name: value for name, value in settings.items() if name != "poison"}
    want = shuffled.never_saw(got["ledger"], dropout=dropout, **same)
    assert differing(got, want) == []
    assert len({tuple(order) for order in want["orders"]}) == shuffled.EPOCHS  # no order comes twice


def test_orders_do_not_repeat(tmp_path: Path) -> None:
    """Nothing draws but the loader, so that the state that went back would give the third epoch's order again."""
    got = shuffled.train(str(tmp_path), poison=[15])
    assert got["ledger"] == [(12, 12, 16)]  # back over the third epoch's start
    orders = [[row for number, rows in got["seen"] if number // 7 == epoch for row in rows] for epoch in range(4)]
    assert [sorted(order) for order in orders] == [list(range(28))] * 4
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("poison", [12, 13, 14])
def test_dropped_updates_leave_no_trace_either(tmp_path: Path, poison: int) -> None:
    got = shuffled.train(str(tmp_path), poison=[poison], dropout=0.3, mode="skip")
    assert [entry[1:] for entry in got["ledger"]] == [(poison, poison + 1)]
    assert differing(got, shuffled.never_saw(got["ledger"], dropout=0.3)) == []


class Stream(IterableDataset[Any]):
    """Rows in an order that is drawn in each epoch but the first, which is read before anybody can seed."""

    def __init__(self) -> None:
        self.rows, self.begun = shuffled.loader().dataset, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        order = torch.arange(shuffled.ROWS) if self.begun == 1 else torch.randperm(shuffled.ROWS)
        for row in order.tolist():
            yield self.rows[row]


LOADERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(shuffled.loader().dataset, shuffled.BATCH, shuffle=True, num_workers=1),
    "weighted": lambda: DataLoader(
        shuffled.loader().dataset, shuffled.BATCH, sampler=WeightedRandomSampler([1.0] * shuffled.ROWS, shuffled.ROWS)
    ),
    "a stream without a length": lambda: DataLoader(Stream(), shuffled.BATCH),
}


@pytest.mark.filterwarnings("ignore:An IterableDataset begins its epoch again")
@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("poison", [13, 15])
def test_other_loaders(tmp_path: Path, poison: int, data: Callable[[], Any]) -> None:
    got = shuffled.train(str(tmp_path), poison=[poison], dropout=0.3, data=data)
    assert len(got["ledger"]) == 1
    assert differing(got, shuffled.never_saw(got["ledger"], dropout=0.3, data=data)) == []


@pytest.mark.parametrize("poison", [6, 13, 15])
def test_a_plateau_is_not_told_of_a_validation_that_was_left_out(tmp_path: Path, poison: int) -> None:
    """An epoch whose last batches are left out has no validation; 6 leaves the first one out, so that none is known."""
    told = []

    class Plateau(shuffled.Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("epoch", float(self.trainer.current_epoch))

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer()
            scheduler = ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "epoch"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            told.append(int(metric))

    shuffled.train(str(tmp_path), poison=[poison], kind=Plateau, held=shuffled.loader())
    assert told == {6: [1, 2, 3], 13: [0, 2, 3], 15: [0, 1, 2, 3]}[poison]


AVERAGES: dict[str, Callable[[int | None, int | None], bool]] = {
    "every step": lambda step, epoch: step is not None,
    "every third step": lambda step, epoch: step is not None and step % 3 == 0,
    "every epoch": lambda step, epoch: epoch is not None,
}


@pytest.mark.parametrize("mode", ["rollback", "skip"])
@pytest.mark.parametrize("when", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("poison", [pytest.param(12, marks=pytest.mark.slow), 15])
def test_an_average_of_weights_goes_back_too(
    tmp_path: Path, poison: int, mode: Any, when: Callable[[int | None, int | None], bool]
) -> None:
    """Lightning's callback leaves its average in the module at the end."""

    class Averaging(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return when(step_idx, epoch_idx)

    averaging = Averaging(multi_avg_fn=get_ema_multi_avg_fn(shuffled.DECAY))
    got = shuffled.train(str(tmp_path), poison=[poison], mode=mode, extra=[averaging])
    assert len(got["ledger"]) == 1
    assert differing(got, shuffled.never_saw(got["ledger"], averages=when)) == []


def train(folder: str, kill: tuple[str, int] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints after every fourth update: at 12, right before the jump over an epoch's end, and at 16, behind it."""
    return shuffled.train(folder, dropout=0.3, save_every=4, kill=kill, **settings)


BLOWS = {
    "before the spike": ("on_before_optimizer_step", 14),
    "right after the rollback": ("on_train_batch_start", 17),
    "later in the epoch": ("on_train_batch_start", 21),
    "in the epoch after it": ("on_before_optimizer_step", 24),
}


@pytest.mark.parametrize("blow", BLOWS.values(), ids=BLOWS)
@pytest.mark.parametrize("poison", [pytest.param(13, marks=pytest.mark.slow), 15])
def test_a_killed_run_ends_alike(tmp_path: Path, ranks: Any, poison: int, blow: tuple[str, int]) -> None:
    settings = {"poison": [poison]}
    (whole,) = ranks(1, train, str(tmp_path / "whole"), None, settings)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(1, train, str(tmp_path / "killed"), blow, settings)
    (got,) = ranks(1, train, str(tmp_path / "killed"), None, settings)
    assert whole["ledger"] == got["ledger"] != []
    assert differing(got, whole) == []


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["right after the rollback", "in the epoch after it"])
def test_two_ranks(tmp_path: Path, ranks: Any, blow: str) -> None:
    settings = {"poison": [15], "rows": 2 * shuffled.ROWS}
    whole = ranks(2, train, str(tmp_path / "whole"), None, settings)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2, train, str(tmp_path / "killed"), BLOWS[blow], settings)
    for got, want in zip(ranks(2, train, str(tmp_path / "killed"), None, settings), whole, strict=True):
        assert got["ledger"] == want["ledger"] != []
        assert differing(got, want) == []
