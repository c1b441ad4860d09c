"""The table that a run must beat, on the run's own validation targets."""

import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_pretrain.callbacks import BaselineReport
from lit_pretrain.corpus import ShardFolders, ShardWriter
from lit_pretrain.data import TokenDataModule
from lit_pretrain.errors import ConfigError
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig

CONFIG = GPTConfig(vocab_size=8, block_size=16, n_layer=1, n_head=1, n_embd=8)


def corpus(root, *, held_out=True):
    """A cycle 1..7 with the end-of-document id 0: a bigram model is nearly certain, a unigram model is not."""
    for name in ("train", "validation"):
        with ShardWriter(root / name, vocab_size=8, eos_id=0) as writer:
            for _ in range(20):
                writer.add(np.arange(70) % 7 + 1)
    return ShardFolders(
        sources={"cycle": root / "train"}, validation={"cycle": root / "validation"} if held_out else None
    )


def data(root, **kwargs):
    return TokenDataModule(corpus(root, **kwargs), sequence_length=16, micro_batch_size=4, global_batch_size=4)


def trainer(callback):
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def test_prints_model_and_baselines(tmp_path, capsys):
    report = BaselineReport()
    t = trainer(report)
    t.fit(GPTModule(CONFIG), datamodule=data(tmp_path))
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("  all sources"))
    model, bigram, unigram = (float(x) for x in line.split()[2:5])
    assert model == pytest.approx(float(t.callback_metrics["val/loss"]), abs=5e-4)
    assert bigram < 0.2  # the cycle is certain; only the document's end surprises
    assert unigram == pytest.approx(math.log(7), abs=0.1)
    assert line.split()[5:] == ["-", "-", "-"]  # no tokenizer, no bytes


def test_refuses_data_it_cannot_score(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.corpus has none"):
        trainer(BaselineReport()).fit(GPTModule(CONFIG), datamodule=data(tmp_path, held_out=False))
    loader = torch.utils.data.DataLoader(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="needs a TokenDataModule"):
        trainer(BaselineReport()).fit(GPTModule(CONFIG), loader)
