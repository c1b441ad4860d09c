"""Whole runs on the device: resumed and rolled back exactly, measured, and never waiting for it without need."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_pretrain.callbacks import ThroughputMonitor
from lit_pretrain.callbacks._rollback.snapshot import Copier, Memory
from lit_pretrain.instantiate.run import build_run
from lit_pretrain.module import GPTModule
from lit_pretrain.planning import peak_flops
from lit_pretrain.plugins import DynamicLossScaler, FolderCheckpointIO, MasterWeightPrecision
from lit_pretrain.specs import GPTConfig
from lit_pretrain.strategies import ZeROStrategy
from tests.support import resumable, spiking
from tests.support.spiking import differing

KINDS = ["fp32", "bf16", "fp16"]


@pytest.fixture
def exactly(accelerator: str) -> Iterator[dict[str, Any]]:
    """Settings of a trainer whose results can be compared to the bit: no kernel adds up in an order of chance."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield {"accelerator": accelerator, "deterministic": "warn"}


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "shards").mkdir()
    resumable.corpus(tmp_path / "shards")
    return str(tmp_path / "shards")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_one_that_never_stopped(root: str, tmp_path: Path, exactly: Any, kind: Any) -> None:
    """With dropout, whose masks the device's own generator draws."""

    def run(name: str, **settings: Any) -> dict[str, Any]:
        plugins = [FolderCheckpointIO(), MasterWeightPrecision(kind)]
        return resumable.run(root, str(tmp_path / name), plugins=plugins, **exactly, **settings)

    whole = run("whole")
    run("halves", max_steps=9)
    again = run("halves")
    assert again["step"] == resumable.UPDATES
    assert differing(again, whole, ("weights", "optimizer", "random", "step", "epoch", "tokens")) == []
    assert _losses(tmp_path / "halves") == _losses(tmp_path / "whole")


def _losses(folder: Path) -> list[str]:
    return [line["loss"] for line in resumable.history(str(folder)) if "update" in line]


@pytest.mark.usefixtures("one_rank")
def test_a_resumed_run_of_ours(root: str, tmp_path: Path, exactly: Any) -> None:
    """Shards on the device, in float16, through a folder that every rank writes its part of."""

    def run(name: str, **settings: Any) -> dict[str, Any]:
        strategy = ZeROStrategy(3, precision="fp16")
        return resumable.run(root, str(tmp_path / name), folders=True, strategy=strategy, **exactly, **settings)

    whole = run("whole")
    run("halves", max_steps=9)
    again = run("halves")
    assert differing(again, whole, ("weights", "optimizer", "random", "step", "epoch", "tokens")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_leaves_no_trace(root: str, tmp_path: Path, exactly: Any, kind: Any) -> None:
    """The oracle never read the poisoned data and knows no rollback."""

    def run(name: str, **settings: Any) -> dict[str, Any]:
        # At a larger scale the poison would overflow float16, and be skipped before it is a spike.
        scaler = DynamicLossScaler(initial_scale=16) if kind == "fp16" else None
        plugins = [MasterWeightPrecision(kind, scaler=scaler)]
        return spiking.run(root, str(tmp_path / name), plugins=plugins, **exactly, **settings)

    got = run("rolled-back", poison=[12, 13], rollback={})
    assert got["rollbacks"] == len(got["ledger"]) >= 1
    skip = [[low, high] for _, low, high, _ in got["ledger"]]
    assert differing(got, run("never-saw", skip=skip)) == []


def test_a_snapshot_holds_what_was_there(device: str) -> None:
    """The copy runs beside training, and what changes the weights waits for it."""
    sources = [torch.full((2**22,), float(i), device=device) for i in range(8)]
    targets = Memory().lay_out(sources)
    assert all(t.is_pinned() for t in targets) == (device == "cuda")
    copier = Copier()
    for _ in range(5):
        copier.copy(list(zip(sources, targets, strict=True)))
        copier.wait()
        for source in sources:
            source.add_(1)
    copier.finish()
    assert all(bool((t == i + 4).all()) for i, t in enumerate(targets))
    copier.close()


def gpt(**settings: Any) -> dict[str, Any]:
    return {"n_layer": 2, "n_head": 2, "n_embd": 128, "vocab_size": 512, "block_size": 64} | settings


def test_utilisation_is_measured_against_the_device(device: str, accelerator: str) -> None:
    if device == "cuda" and peak_flops(torch.cuda.get_device_name()) is None:
        pytest.skip(f"no peak is published here for {torch.cuda.get_device_name()}")
    ids = torch.randint(512, (30, 8, 65), generator=torch.Generator().manual_seed(0))
    batches = [{"ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in ids]
    monitor = ThroughputMonitor(tokens_per_batch=8 * 64, window=10)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        plugins=MasterWeightPrecision("bf16"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
        callbacks=[monitor],
    )
    trainer.fit(GPTModule(GPTConfig(**gpt())), torch.utils.data.DataLoader(batches, batch_size=None))
    figures = trainer.logged_metrics
    assert 0 < figures["perf/mfu"] <= 1
    if device == "cuda":
        peak = peak_flops(torch.cuda.get_device_name())
        assert peak is not None
        speed = figures["perf/tokens_per_s"] * monitor._flops
        assert float(figures["perf/mfu"]) == pytest.approx(float(speed) / peak, rel=1e-5)
        assert 0 < figures["perf/memory_gib"] <= torch.cuda.max_memory_allocated() / 2**30


# ---------------------------------------------------------------- waits


@contextmanager
def listening(device: str) -> Iterator[list[str]]:
    """Places that wait for the device, as torch itself notices them."""
    found: list[str] = []
    if device == "cpu":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


class Listen(pl.Callback):
    """Listens to whole updates, from the fetch of a batch to the last hook; of those that log nothing."""

    order = 1000

    def __init__(self, device: str, *, start: int, stop: int) -> None:
        self.device, self.start, self.stop = device, start, stop
        self.heard: list[str] | None = None
        self._context: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.start and self._context is None:
            self._context = listening(self.device)
            self.heard = self._context.__enter__()
        elif trainer.global_step == self.stop and self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def test_listening_hears(device: str) -> None:
    """Otherwise the test below would prove nothing."""
    if device == "cpu":
        pytest.skip("a CPU has nothing to wait for")
    with listening(device) as found:
        float(torch.ones((), device=device))
    assert len(found) == 1
    assert __file__ in found[0]


@pytest.mark.parametrize(("precision", "waits"), [("fp32", 0), ("bf16", 0), ("fp16", 1)])
def test_default_callbacks_never_wait(
    device: str, accelerator: str, tmp_path: Path, precision: str, waits: int, root: str
) -> None:
    """Updates that log nothing: no wait at all; under fp16 one, for whether to step."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from lit_pretrain.cli import resolvers

    resolvers.register()
    updates = 12
    overrides = [
        "data=shards",
        f"data.corpus.sources={{text: {root}/train}}",
        "data.corpus.tokenizer=null",
        "~callbacks.sampler",
        "callbacks.progress.interval_s=1000",  # its lines read the loss
        "model=gpt-tiny",
        f"model.vocab_size={resumable.VOCAB}",
        f"data.sequence_length={resumable.T}",
        f"precision={precision}",
        f"trainer.accelerator={accelerator}",
        "trainer.log_every_n_steps=100",
        "length.steps=20",
        "batch.global_batch_size=4",
        "batch.micro_batch_size=2",
        "validation.every_steps=20",
        f"run.dir={tmp_path}/run",
    ]
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("train", overrides), resolve=True)
    assert isinstance(config, dict)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved.yaml").write_text(yaml.safe_dump(config))
    run = build_run({str(k): v for k, v in config.items()})
    listen = Listen(device, start=4, stop=4 + updates)
    run.trainer.callbacks.append(listen)
    run.trainer.fit(run.module, datamodule=run.datamodule)
    assert listen.heard is not None
    assert listen._context is None
    expected = waits * updates if device == "cuda" else 0
    assert len(listen.heard) == expected, sorted(set(listen.heard))
