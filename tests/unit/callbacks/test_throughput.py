from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import ThroughputMonitor
from lit_pretrain.callbacks._measuring.meter import StepMeter
from lit_pretrain.callbacks._measuring.peak import MatmulPeak, matmul_peak
from lit_pretrain.callbacks.throughput import memory_bytes
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Clock:
    """Time passes only when somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Timed(Tiny):
    """A step takes 2 s, validation 1000 s, the first step 500 s more (compilation)."""

    def __init__(self, clock, **settings):
        super().__init__(**settings)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 2.0 + (500.0 if self.trainer.global_step == 0 else 0.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000.0


class Slow(torch.utils.data.IterableDataset):
    """A batch takes 0.5 s to come."""

    def __init__(self, clock):
        self.clock = clock

    def __iter__(self):
        for batch in loader():
            self.clock.now += 0.5
            yield batch


class Saves(Callback):
    """Saving takes 300 s."""

    def __init__(self, clock):
        self.clock = clock

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.clock.now += 300.0


class Data(LightningDataModule):
    tokens_per_update = 640

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Slow(self.clock), batch_size=None)

    def val_dataloader(self):
        return loader()


class Notes(Callback):
    def __init__(self):
        self.metrics = []

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("perf/")})


def test_training_time_only(tmp_path):
    clock, notes = Clock(), Notes()
    monitor = ThroughputMonitor(clock=clock, flops_per_token=1e6, peak_flops=1e9, window=4, ignore_updates=1)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    run = trainer(
        tmp_path, monitor, Saves(clock), notes, saver, max_steps=12, num_sanity_val_steps=2, val_check_interval=3,
        limit_val_batches=2, enable_checkpointing=True,
    )  # fmt: skip
    run.fit(Timed(clock), datamodule=Data(clock))
    assert clock.now > 100 + 4 * 2000 + 2 * 300, "the case has to hold validation and saving"
    assert "perf/step_time_s" not in notes.metrics[0], "the first update is left out"
    # Updates 2 and 3 carry 2 s of work and their 0.5 s wait; update 4 follows a validation and update 6 a checkpoint:
    # their wait is unknown.
    assert [m["perf/step_time_s"] for m in notes.metrics[1:3]] == [2.5, 2.5]
    assert notes.metrics[3]["perf/step_time_s"] == pytest.approx((2.5 + 2.5 + 2.0) / 3)
    assert notes.metrics[5]["perf/step_time_s"] == pytest.approx((2.5 + 2.0 + 2.5 + 2.0) / 4)
    assert notes.metrics[5]["perf/data_time_s"] == pytest.approx((0.5 + 0.0 + 0.5 + 0.0) / 4)
    assert notes.metrics[2]["perf/tokens_per_s"] == pytest.approx(640 / 2.5)
    assert notes.metrics[2]["perf/mfu"] == pytest.approx(640 / 2.5 * 1e6 / 1e9)
    assert [m["perf/tokens"] for m in notes.metrics] == [640 * (i + 1) for i in range(12)]
    assert all(2.0 <= m["perf/step_time_s"] <= 2.5 for m in notes.metrics[1:])


def test_accumulation_counts_updates(tmp_path):
    clock, notes = Clock(), Notes()
    monitor = ThroughputMonitor(clock=clock, ignore_updates=1, peak_flops=None)
    run = trainer(tmp_path, monitor, notes, max_steps=3, accumulate_grad_batches=4, limit_val_batches=0)
    run.fit(Timed(clock), datamodule=Data(clock))
    assert run.callback_metrics["perf/step_time_s"] == pytest.approx(4 * 2.5)
    assert run.callback_metrics["perf/data_time_s"] == pytest.approx(4 * 0.5)
    assert run.callback_metrics["perf/tokens_per_s"] == pytest.approx(640 / 10)
    assert run.callback_metrics["perf/tokens"] == 3 * 640
    assert "perf/mfu" not in run.callback_metrics


@pytest.mark.parametrize(("setting", "tokens"), [(7, 21), (lambda batch: batch[0].numel(), 36), (None, None)])
def test_tokens_of_a_plain_loader(tmp_path, setting, tokens):
    monitor = ThroughputMonitor(tokens_per_batch=setting, ignore_updates=0)
    run = trainer(tmp_path, monitor, max_steps=3)
    run.fit(Tiny(), loader())
    assert run.callback_metrics.get("perf/tokens") == tokens
    assert ("perf/tokens_per_s" in run.callback_metrics) == (tokens is not None)
    assert run.callback_metrics["perf/step_time_s"] > 0
    assert run.callback_metrics["perf/memory_gib"] > 0.01


class Products:
    """Matrix products of 1 MFLOP on a clock of their own; each takes the next of ``seconds``, then the last again."""

    def __init__(self, *seconds):
        self.seconds, self.clock, self.done = list(seconds), Clock(), 0

    def __call__(self):
        self.done += 1
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]

    def peak(self):
        return MatmulPeak([self], [1e6], clock=self.clock)


def test_the_best_product_counts_and_starting_is_short():
    # a slow first product (threads), then a machine whose other work lets one product in nine alone
    products = Products(0.3, *[0.008] * 8, 0.001, 0.008)
    assert products.peak().flops_per_s == pytest.approx(1e6 / 0.001)
    # three bursts, each until 0.05 s are over: 7 products of 8 ms, and one more in the first, for 1 ms is short
    assert products.done - 1 <= 3 * 7 + 1
    assert products.clock.now - 100 - 0.3 < 3 * (0.05 + 0.008)


def test_a_beaten_peak_is_measured_again():
    products = Products(0.008)
    peak = products.peak()
    assert peak.flops_per_s == pytest.approx(1.25e8)
    before = products.done
    assert peak.challenge(1.2e8) == pytest.approx(1.25e8)
    assert products.done == before, "nothing is measured while nothing is beaten"
    products.seconds = [0.008, 0.002]  # the machine has become quiet
    assert peak.challenge(2e8) == pytest.approx(5e8)
    assert peak.challenge(4e8) == pytest.approx(5e8)


def test_a_peak_that_stays_beaten_follows_with_one_warning():
    products = Products(0.01)
    peak = products.peak()
    now = products.clock.now
    with pytest.warns(UserWarning, match=r"runs at 0\.2 GFLOP/s, matrix products alone at 0\.1: flops_per_token"):
        assert peak.challenge(2e8) == 2e8
    assert products.clock.now - now < 4 * (0.05 + 0.01), "measuring again is short too"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak.challenge(4e8) == 4e8


def test_a_share_of_a_measured_peak_is_at_most_one(tmp_path, monkeypatch):
    """Steps of 2 s on the monitor's clock beat what was measured; measuring again is not training time."""
    clock, notes, products = Clock(), Notes(), Products(0.01)
    peak = products.peak()
    products.seconds = [0.005]
    products.clock = peak._clock = clock
    monkeypatch.setattr("lit_pretrain.callbacks.throughput.device_peak_flops", lambda device, dtype: peak)
    monitor = ThroughputMonitor(clock=clock, flops_per_token=150e6 * 2.0 / 640, window=1, ignore_updates=1)
    run = trainer(tmp_path, monitor, notes, max_steps=6, limit_val_batches=0)
    run.fit(Timed(clock), datamodule=Data(clock))
    # 640 tokens in 2.5 s: 120 MFLOP/s beat the 100 measured with products of 10 ms; those of 5 ms make 200.
    assert notes.metrics[1]["perf/mfu"] == pytest.approx(120 / 200)
    # The next update is without its wait of 0.5 s, unknown after a pause, and without the measurement.
    assert [m["perf/step_time_s"] for m in notes.metrics[1:]] == pytest.approx([2.5, 2.0, 2.5, 2.5, 2.5])
    assert all(m["perf/mfu"] <= 1 for m in notes.metrics[1:])


@pytest.mark.parametrize(("precision", "expected"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_the_peak_is_measured_in_the_type_that_training_multiplies_in(tmp_path, monkeypatch, precision, expected):
    seen = []
    monkeypatch.setattr("lit_pretrain.callbacks.throughput.device_peak_flops", lambda device, dtype: seen.append(dtype))
    monitor = ThroughputMonitor(tokens_per_batch=10, flops_per_token=1.0)
    with pytest.warns(UserWarning, match="No peak FLOP/s is known"):
        trainer(tmp_path, monitor, max_steps=1, precision=precision).fit(Tiny(), loader())
    assert seen == [expected]


def test_mfu_against_a_measured_peak_with_the_modules_own_flops(tmp_path):
    model = Tiny()
    model.flops_per_token = 1e6
    run = trainer(tmp_path, ThroughputMonitor(tokens_per_batch=10, ignore_updates=0), max_steps=3)
    run.fit(model, loader())
    peak = matmul_peak(torch.float32, torch.get_num_threads()).flops_per_s
    speed = float(run.callback_metrics["perf/tokens_per_s"])
    assert float(run.callback_metrics["perf/mfu"]) == pytest.approx(speed * 1e6 / peak, rel=1e-5)


def test_measured_peak_is_a_plausible_rate():
    # No CPU core is below 0.1 or above 10,000 GFLOP/s.
    assert 1e8 < matmul_peak(torch.float32, torch.get_num_threads()).flops_per_s < 1e13


def test_memory_grows_with_what_is_held():
    before = memory_bytes(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert memory_bytes(torch.device("cpu")) - before == pytest.approx(held.numel(), rel=0.2)


def test_tokens_go_on_after_a_resume(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, ThroughputMonitor(tokens_per_batch=10), saver, max_steps=2, enable_checkpointing=True).fit(
        Tiny(), loader()
    )
    monitor = ThroughputMonitor(tokens_per_batch=10)
    trainer(tmp_path, monitor, max_steps=5).fit(Tiny(), loader(), ckpt_path=tmp_path / "step=2.ckpt")
    assert monitor.tokens == 50


def test_a_drain_is_training_time():
    """What the device still had to do when validation began belongs to the update that queued it."""
    clock = Clock()
    meter = StepMeter(window=2, ignore=0, clock=clock)

    def drain():
        clock.now += 3.0

    for _ in range(2):
        meter.batch_start()
        clock.now += 1.0
        meter.batch_end(tokens=10, completes_update=True)
    meter.pause(drain=drain)
    meter.pause(drain=drain)  # a second pause finds nothing
    clock.now += 1000.0
    assert meter.seconds_per_update == 2.5
    assert meter.tokens_per_second == 4.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 0}, "window=0"),
        ({"ignore_updates": -1}, "ignore_updates=-1"),
        ({"flops_per_token": 0.0}, "flops_per_token=0"),
        ({"peak_flops": -1.0}, "peak_flops=-1"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ConfigError, match=words):
        ThroughputMonitor(**settings)


def test_fast_dev_run(tmp_path):
    trainer(tmp_path, ThroughputMonitor(tokens_per_batch=4), fast_dev_run=2).fit(Tiny(), loader(), loader())
