"""A run resumed from Lightning's own checkpoint reads on as if nothing had happened."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.corpus import ShardFolders
from lit_pretrain.data import TokenDataModule
from lit_pretrain.data.identity import PlanIdentity
from lit_pretrain.errors import ConfigError


class SaveAt(pl.Callback):
    """Saves when so many batches have been read, in one of the hooks where callbacks save."""

    def __init__(self, batches: int, path: Path, *, hook: str = "on_train_batch_end") -> None:
        self.batches, self.path = batches, path
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if len(module.read) == self.batches:
            trainer.save_checkpoint(self.path)


def data(corpus: Any, **settings: Any) -> TokenDataModule:
    return TokenDataModule(
        corpus, **({"sequence_length": 8, "micro_batch_size": 4, "global_batch_size": 8, "seed": 3} | settings)
    )


def test_an_epoch_is_about_one_pass(corpus: Any, trainer: Any, recorder: Any) -> None:
    module = recorder()
    trainer(max_epochs=2, limit_val_batches=0, accumulate_grad_batches=2).fit(module, datamodule=data(corpus))
    per_epoch = data(corpus).updates_per_epoch * 2
    assert module.read == list(range(2 * per_epoch))
    windows = sum(data(corpus).plan.windows)
    assert windows - 8 < per_epoch * 4 <= windows


@pytest.mark.parametrize("batches", [2, 10, "epoch", "epoch+6", "2 epochs+4"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_mid_epoch_resume_reads_on(
    corpus: Any, trainer: Any, recorder: Any, tmp_path: Path, batches: Any, prefetch: int
) -> None:
    per_epoch = data(corpus).updates_per_epoch * 2
    at = {"epoch": per_epoch, "epoch+6": per_epoch + 6, "2 epochs+4": 2 * per_epoch + 4}.get(batches, batches)
    settings = {"max_steps": 3 * per_epoch // 2, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    whole, resumed, path = recorder(), recorder(), tmp_path / "a.ckpt"
    trainer(**settings, callbacks=[SaveAt(at, path)]).fit(whole, datamodule=data(corpus, prefetch=prefetch))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer(**settings).fit(resumed, datamodule=data(corpus, prefetch=prefetch), ckpt_path=path)
    assert resumed.read == whole.read[at:]
    assert resumed.rows == whole.rows[4 * at :]
    assert len(whole.read) == 3 * per_epoch


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_resume_with_validation_in_between(corpus: Any, trainer: Any, recorder: Any, tmp_path: Path, hook: str) -> None:
    settings = {"max_steps": 12, "accumulate_grad_batches": 2, "val_check_interval": 6, "check_val_every_n_epoch": None}
    whole, resumed, path = recorder(), recorder(), tmp_path / "a.ckpt"
    trainer(**settings, callbacks=[SaveAt(12, path, hook=hook)]).fit(whole, datamodule=data(corpus))
    trainer(**settings).fit(resumed, datamodule=data(corpus), ckpt_path=path)
    assert whole.read == list(range(24))
    assert resumed.read == whole.read[12:]
    assert resumed.rows == whole.rows[48:]


def test_resume_when_the_loader_was_asked_for_early(corpus: Any, trainer: Any, recorder: Any, tmp_path: Path) -> None:
    """A module that asks for `estimated_stepping_batches` makes Lightning iterate before it restores its counters."""

    class Early(recorder):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 8
            return super().configure_optimizers()

    settings = {"max_steps": 8, "max_epochs": 50, "limit_val_batches": 0}
    one = {"global_batch_size": 4}
    whole, resumed, path = Early(), Early(), tmp_path / "a.ckpt"
    trainer(**settings, callbacks=[SaveAt(5, path)]).fit(whole, datamodule=data(corpus, **one))
    trainer(**settings).fit(resumed, datamodule=data(corpus, **one), ckpt_path=path)
    assert resumed.read == [5, 6, 7]
    assert resumed.rows == whole.rows[20:]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 8), (1, 8), (8, 1)])
@pytest.mark.parametrize("updates", [5, "epoch", "epoch+3"])
def test_resume_with_another_microbatch_size(
    corpus: Any, trainer: Any, recorder: Any, tmp_path: Path, before: int, after: int, updates: Any
) -> None:
    epoch = data(corpus).updates_per_epoch
    at = {"epoch": epoch, "epoch+3": epoch + 3}.get(updates, updates)
    common = {"max_steps": 2 * epoch + 2, "limit_val_batches": 0}
    whole, resumed, path = recorder(), recorder(), tmp_path / "a.ckpt"
    before_trainer = trainer(**common, accumulate_grad_batches=8 // before, callbacks=[SaveAt(at * 8 // before, path)])
    before_trainer.fit(whole, datamodule=data(corpus, micro_batch_size=before))
    after_trainer = trainer(**common, accumulate_grad_batches=8 // after)
    after_trainer.fit(resumed, datamodule=data(corpus, micro_batch_size=after), ckpt_path=path)
    assert resumed.rows == whole.rows[8 * at :]
    assert after_trainer.global_step == before_trainer.global_step == 2 * epoch + 2
    assert after_trainer.current_epoch == before_trainer.current_epoch


def test_another_microbatch_size_in_the_middle_of_an_update(
    corpus: Any, trainer: Any, recorder: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    settings = {"max_steps": 4, "limit_val_batches": 0}
    trainer(**settings, accumulate_grad_batches=2, callbacks=[SaveAt(5, path)]).fit(recorder(), datamodule=data(corpus))
    with pytest.raises(ConfigError, match="in the middle of an update"):
        trainer(**settings).fit(recorder(), datamodule=data(corpus, micro_batch_size=8), ckpt_path=path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 4}, r"data\.seed was 3, is 4"),
        ({"sequence_length": 7}, r"data\.sequence_length was 8, is 7"),
        ({"isolate_documents": True}, r"data\.isolate_documents was False, is True"),
        ({"global_batch_size": 4, "micro_batch_size": 2}, r"data\.global_batch_size was 8, is 4"),
        ({"weights": {"big": 1, "small": 1}}, r"data\.weights was .* differs before data step 6"),
        ({"skip": [(2, 3)]}, r"data\.skip was \[\], is \[\[2, 3\]\]: it differs before update 6"),
    ],
)
def test_another_plan_is_refused(
    corpus: Any, trainer: Any, recorder: Any, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path, settings = tmp_path / "a.ckpt", {"max_steps": 8, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    trainer(**settings, callbacks=[SaveAt(12, path)]).fit(recorder(), datamodule=data(corpus))
    module = recorder()
    with pytest.raises(ConfigError, match=says):
        trainer(**settings).fit(module, datamodule=data(corpus, **change), ckpt_path=path)
    assert module.read == []


def test_other_text_is_refused_but_may_be_evaluated(
    corpus: Any, shards: Any, trainer: Any, recorder: Any, tmp_path: Path
) -> None:
    path, settings = tmp_path / "a.ckpt", {"max_steps": 4, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    trainer(**settings, callbacks=[SaveAt(4, path)]).fit(recorder(), datamodule=data(corpus))
    other = ShardFolders(sources={"big": shards["sources"]["big"]}, validation={"big": shards["validation"]["big"]})
    with pytest.raises(ConfigError, match=r"data\.sources was"):
        trainer(**settings).fit(recorder(), datamodule=data(other), ckpt_path=path)
    module = recorder()
    trainer(accumulate_grad_batches=2).validate(module, datamodule=data(other, seed=9), ckpt_path=path)
    assert module.validated


def test_weights_and_skips_may_change_for_what_comes(corpus: Any, trainer: Any, recorder: Any, tmp_path: Path) -> None:
    path, settings = tmp_path / "a.ckpt", {"max_steps": 12, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    old, new = {"big": 1, "small": 1}, [(6, {"big": 1, "small": 1}), (8, {"big": 0, "small": 1})]
    trainer(**settings, callbacks=[SaveAt(12, path)]).fit(recorder(), datamodule=data(corpus, weights=old))
    module = recorder()
    changed = data(corpus, weights={"points": new}, skip=[(7, 9)])
    trainer(**settings).fit(module, datamodule=changed, ckpt_path=path)
    assert module.read == [12, 13, *range(18, 28)]
    assert changed.plan.shares(8) == {"big": 0.0, "small": 1.0}


def test_a_million_updates_into_a_run(corpus: Any, trainer: Any, recorder: Any, tmp_path: Path) -> None:
    """The first batch comes within a second, though the weights moved all the way and stretches were left out."""
    plan = {
        "weights": {"points": [(0, {"big": 3, "small": 1}), (1_200_000, {"big": 1, "small": 3})]},
        "skip": [(1000 * i, 1000 * i + 7) for i in range(1, 1000)],
    }
    path, settings = tmp_path / "a.ckpt", {"limit_val_batches": 0, "accumulate_grad_batches": 2}
    trainer(**settings, max_steps=1, callbacks=[SaveAt(2, path)]).fit(recorder(), datamodule=data(corpus, **plan))
    checkpoint = torch.load(path, weights_only=True)
    per_epoch = 2 * data(corpus, **plan).updates_per_epoch
    later = 2_000_000 // per_epoch * per_epoch  # microbatches; one update into an epoch
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["total"] = {name: count + later for name, count in progress["total"].items()}
    torch.save(checkpoint, path)
    module, began = recorder(), time.monotonic()
    first: list[float] = []
    module.on_train_batch_start = lambda *_: first.append(time.monotonic() - began)  # type: ignore[method-assign]
    trainer(**settings, max_steps=2).fit(module, datamodule=data(corpus, **plan), ckpt_path=path)
    left_out = 999 * 7  # updates of 2 microbatches
    assert module.read == [later + 2 * left_out + 2, later + 2 * left_out + 3]
    assert first[0] < 1  # 0.3 s on an idle core, the Trainer's own start included


def test_a_state_of_a_later_release(corpus: Any) -> None:
    with pytest.raises(ConfigError, match="version 99"):
        PlanIdentity.from_state({"version": 99})
