"""GPTModule on two data-parallel ranks in mixed precision, with dropout, and validating uneven held-out text."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lit_pretrain.corpus import ShardFolders, ShardWriter
from lit_pretrain.data import TokenDataModule
from lit_pretrain.models import GPT
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig

VOCAB, T = 61, 8
HELD_OUT = {"a": 13 * T + 4, "b": 3 * T}  # tokens: 13 and 3 windows, the last of each shorter than T
# Weights so large that the loss differs much from token to token: a mean weighted by batches would be seen.
CONFIG = GPTConfig(vocab_size=VOCAB, block_size=T, n_layer=2, n_head=2, n_embd=16, init_std=0.6)


def held_out_ids(name: str) -> list[int]:
    ids = np.random.default_rng(ord(name)).integers(1, VOCAB, HELD_OUT[name] - 1)
    # Runs of one id in "b": an easy source and a hard one.
    return (np.repeat(ids[::4], 4)[: ids.size] if name == "b" else ids).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    for name in "ab":
        with ShardWriter(root / name, vocab_size=VOCAB, eos_id=0) as writer:
            for _ in range(12):
                writer.add(random.integers(1, VOCAB, 49))
        with ShardWriter(root / f"{name}-val", vocab_size=VOCAB, eos_id=0) as writer:
            writer.add(held_out_ids(name))
    return {
        "sources": {name: str(root / name) for name in "ab"},
        "validation": {name: str(root / f"{name}-val") for name in "ab"},
    }


class Steps(pl.Callback):
    """Losses of the updates, and what the first microbatch gave on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.first = float(outputs["loss"]) if self.first is None else self.first
        if trainer.global_step > len(self.losses):
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def run(folders: Any, config: GPTConfig, settings: dict[str, Any], *, world: int) -> dict[str, Any]:
    """Trains 12 rows an update, 3 updates, and validates before and after."""
    steps = Steps()
    module = GPTModule(config, optimizer=sgd)
    micro = settings.pop("micro")
    data = TokenDataModule(
        ShardFolders(**folders), sequence_length=T, micro_batch_size=micro, global_batch_size=12, seed=1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_steps=3,
        accumulate_grad_batches=12 // (micro * world),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=3 * 12 // (micro * world),
        callbacks=[steps],
        **settings,
    )
    pl.seed_everything(5, verbose=False)
    before = {k: float(v) for k, v in trainer.validate(module, data, verbose=False)[0].items()}
    trainer.fit(module, datamodule=data)
    after = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")}
    weights = {k: v.detach().double().numpy() for k, v in module.model.state_dict().items()}
    return {"before": before, "after": after, "losses": steps.losses, "first": steps.first, "weights": weights}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_ranks(folders: Any, config: GPTConfig, settings: dict[str, Any]) -> dict[str, Any]:
    return run(folders, config, dict(settings), world=2)


def by_hand(module: GPTModule, names: str) -> float:
    """Mean nats per target over held-out windows, one window at a time, without any of the code under test."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    model: GPT = module.model.double().eval()
    for name in names:
        ids = torch.tensor([*held_out_ids(name), 0])
        for low in range(0, len(ids) - 1, T):
            inputs, targets = ids[low : low + T], ids[low + 1 : low + T + 1]
            logits: Tensor = model.logits(model(inputs[None, : len(targets)]))
            total += torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum").detach()
            count += len(targets)
    return float(total) / count


def close(results: dict[str, Any], reference: dict[str, Any], *, rel: float) -> None:
    assert results["losses"] == pytest.approx(reference["losses"], rel=rel)
    for when in ("before", "after"):
        assert results[when] == pytest.approx(reference[when], rel=rel)


def test_validation_over_ranks_counts_every_token_once(ranks: Any, folders: Any) -> None:
    """16 windows over 2 ranks and microbatches of 3: the last batch is filled up, differently on each rank."""
    settings = {"precision": "64-true", "micro": 3}
    for result in (*ranks(2, on_ranks, folders, CONFIG, settings), run(folders, CONFIG, dict(settings), world=1)):
        fresh = GPTModule(CONFIG)
        for key, names in (("val/loss", "ab"), ("val/loss/a", "a"), ("val/loss/b", "b")):
            assert result["before"][key] == pytest.approx(by_hand(fresh, names), rel=1e-6)  # logged as float32
        assert result["before"]["val/perplexity"] == pytest.approx(math.exp(by_hand(fresh, "ab")), rel=1e-5)
        unweighted = (result["before"]["val/loss/a"] + result["before"]["val/loss/b"]) / 2
        assert abs(unweighted / result["before"]["val/loss"] - 1) > 0.02, "the case must tell the means apart"


def test_bf16_on_two_ranks_follows_one_process(ranks: Any, folders: Any) -> None:
    settings = {"precision": "bf16-mixed", "micro": 3}
    reference = run(folders, CONFIG, {"precision": "bf16-mixed", "micro": 6}, world=1)
    exact = run(folders, CONFIG, {"precision": "64-true", "micro": 6}, world=1)
    for result in ranks(2, on_ranks, folders, CONFIG, settings):
        assert np.isfinite(result["losses"]).all()
        # bf16 keeps 8 bits: 2^-8 a product, some ten of them in a row.
        close(result, reference, rel=10 * 2**-8)
        close(result, exact, rel=10 * 2**-8)
        assert result["losses"] != pytest.approx(exact["losses"], rel=1e-5), "bf16 has to be on"
        for name, want in reference["weights"].items():
            assert abs(result["weights"][name] - want).max() <= 10 * 2**-8 * max(1.0, abs(want).max()), name


def test_dropout_on_two_ranks(ranks: Any, folders: Any) -> None:
    """Rank 0 draws as one process does, rank 1 otherwise; validation draws nothing."""
    config = GPTConfig(**{**vars(CONFIG), "dropout": 0.5})
    same_rows = {"precision": "64-true", "micro": 6}
    first, second = ranks(2, on_ranks, folders, config, same_rows)
    again, _ = ranks(2, on_ranks, folders, config, same_rows)
    plain = run(folders, CONFIG, {"precision": "64-true", "micro": 6}, world=1)
    assert first["losses"] == second["losses"] == again["losses"]
    assert np.isfinite(first["losses"]).all()
    assert abs(first["losses"][0] / plain["losses"][0] - 1) > 0.01, "dropout has to be on"
    assert first["before"] == second["before"] == pytest.approx(plain["before"], rel=1e-6)
    for name, weight in first["weights"].items():
        assert (weight == second["weights"][name]).all(), name


def one_draw(folders: Any, config: GPTConfig) -> list[float]:
    """The loss of the very same rows on each rank, at the first step of training."""
    seen: list[float] = []

    class Same(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = {"ids": torch.arange(2 * T).reshape(2, T), "targets": torch.arange(2 * T).reshape(2, T)}
            loss = super().training_step(rows, batch_idx)
            seen.append(float(loss.detach()))
            return loss

    pl.seed_everything(5, verbose=False)
    data = TokenDataModule(ShardFolders(**folders), sequence_length=T, micro_batch_size=6, global_batch_size=12)
    pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=1, use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    ).fit(Same(config, optimizer=sgd), datamodule=data)  # fmt: skip
    return seen


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_masks_differ_between_data_parallel_ranks(ranks: Any, folders: Any, dropout: float) -> None:
    config = GPTConfig(**{**vars(CONFIG), "dropout": dropout})
    first, second = ranks(2, one_draw, folders, config)
    assert (first == second) == (dropout == 0.0)


SPAWNED = """
import sys
import lightning.pytorch as pl
from pathlib import Path
from lit_pretrain.callbacks import GradientClipping, ThroughputMonitor, WarmupCosine
from lit_pretrain.corpus import ShardFolders
from lit_pretrain.data import TokenDataModule
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig

if __name__ == "__main__":
    root, devices, strategy = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pl.seed_everything(5, verbose=False)
    data = TokenDataModule(
        ShardFolders(sources={n: root / n for n in "ab"}, validation={n: root / f"{n}-val" for n in "ab"}),
        sequence_length=8, micro_batch_size=6 // devices, global_batch_size=12, seed=1,
    )
    module = GPTModule(GPTConfig(vocab_size=61, block_size=8, n_layer=2, n_head=2, n_embd=16))
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, precision="64-true", max_steps=3,
        accumulate_grad_batches=2, val_check_interval=6, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[WarmupCosine(warmup_steps=1), GradientClipping(1.0), ThroughputMonitor()],
    )
    trainer.fit(module, datamodule=data)
    metrics = trainer.callback_metrics
    print("RESULT", *(float(metrics[name]) for name in ("train/loss", "val/loss", "train/grad_norm", "perf/tokens")))
"""


@pytest.mark.slow
def test_the_spawn_launcher_of_a_plain_trainer(folders: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNED)
    root = str(Path(folders["sources"]["a"]).parent)

    def results(devices: int, strategy: str) -> list[float]:
        done = subprocess.run(
            [sys.executable, "script.py", root, str(devices), strategy],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        return [float(word) for word in line.split()[1:]]

    one, two = results(1, "auto"), results(2, "ddp_spawn")
    assert two == pytest.approx(one, rel=1e-6)
    assert one[-1] == 3 * 12 * T
