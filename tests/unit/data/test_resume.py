"""A run resumed from Lightning's own checkpoint reads on as if nothing had happened."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lit_pretrain.data import TokenDataModule


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


@pytest.mark.parametrize("batches", [2, 10, 22, "epoch", "epoch+6", "2 epochs+4"])
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
