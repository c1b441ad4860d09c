"""GPTModule(compile=True) trains as the eager one does, and nobody sees it in a checkpoint."""

from __future__ import annotations

import shutil

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig

GPT2 = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16)
LLAMA = GPTConfig(
    vocab_size=61, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, position="rope", norm="rmsnorm",
    mlp="swiglu", bias=False, tie_embeddings=False, qk_norm=True, z_loss=1e-4,
)  # fmt: skip
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile needs a C++ compiler"
)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(trainer.callback_metrics["train/loss"].item())


def batches():
    g = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 61, (4, 4, 17), generator=g)
    targets = rows[:, :, 1:].clone()
    targets[:, 0, :5] = -100
    return torch.utils.data.DataLoader(
        [{"ids": ids, "targets": t} for ids, t in zip(rows[:, :, :-1], targets, strict=True)], batch_size=None
    )


def train(folder, config, *, compile, activation_checkpointing="none"):
    losses = Losses()
    module = GPTModule(config, compile=compile, activation_checkpointing=activation_checkpointing)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, callbacks=[losses],
    )  # fmt: skip
    trainer.fit(module, batches(), batches())
    path = folder / f"{compile}.ckpt"
    trainer.save_checkpoint(path)
    return losses.seen, trainer.callback_metrics["val/loss"].item(), path


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("config", "activation_checkpointing"), [(GPT2, "none"), (LLAMA, "full")])
def test_compiled_training_equals_eager(tmp_path, monkeypatch, config, activation_checkpointing):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    eager = train(tmp_path, config, compile=False, activation_checkpointing=activation_checkpointing)
    assert not counters["stats"], "the eager run must not compile"
    compiled = train(tmp_path, config, compile=True, activation_checkpointing=activation_checkpointing)
    assert counters["stats"]["unique_graphs"] >= 1, "something has to be compiled"
    assert len(compiled[0]) == 4
    # float32 sums in another order: 2^-24 a sum of some hundred terms, over four updates.
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    assert compiled[1] == pytest.approx(eager[1], rel=1e-5)
    want, found = (torch.load(path, weights_only=True)["state_dict"] for _, _, path in (eager, compiled))
    assert list(found) == list(want)
    assert not any("_orig_mod" in name for name in found)
    # AdamW divides by the size of the gradient, so a gradient of rounding alone moves its weight by the learning rate.
    for name, value in want.items():
        assert (found[name] - value).abs().max() <= 1e-3 * max(1.0, value.abs().max()), name
    again = GPTModule.load_from_checkpoint(compiled[2], weights_only=True)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in want.items()}
