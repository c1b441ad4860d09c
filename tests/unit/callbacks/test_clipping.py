from __future__ import annotations

import copy
import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

from lit_pretrain.callbacks import GradientClipping
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Tiny, loader, trainer

NAN, INF = float("nan"), float("inf")


class Peek(Callback):
    """Gradients after every callback before it, right before the optimizer; and the metrics after the batch."""

    def __init__(self):
        self.gradients, self.metrics = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([g.flatten().double() for g in grads]) if grads else None)

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def by_hand(model, batches, lr, max_norm):
    """A loop without Lightning or torch's clipping: norms before, and the model after plain SGD."""
    model, norms = copy.deepcopy(model), []
    for window in batches:
        model.zero_grad()
        for x, y in window:
            (((model.net(x) - y) ** 2).mean() / len(window)).backward()
        grads = [p.grad for p in model.parameters()]
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
        norms.append(norm)
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= lr * g * min(1.0, max_norm / norm)
    return norms, model


@pytest.mark.parametrize("accumulate", [1, 4])
def test_norms_share_and_weights_equal_a_loop_by_hand(tmp_path, accumulate):
    batches = list(loader(dtype=torch.float64))
    windows = [batches[i : i + accumulate] for i in range(0, 16, accumulate)]
    model = Tiny(lr=0.1).double()
    norms, want = by_hand(model, windows, 0.1, 1.9)
    assert 0 < sum(n > 1.9 for n in norms) < len(norms), "the case has to hold clipped and unclipped updates"
    peek = Peek()
    run = trainer(tmp_path, GradientClipping(1.9), peek, precision="64-true", accumulate_grad_batches=accumulate)
    run.fit(model, batches_of(batches))
    got = [m["train/grad_norm"] for m in peek.metrics[accumulate - 1 :: accumulate]]
    assert got == pytest.approx(norms, rel=1e-6)  # Lightning keeps logged values in float32
    clipped = [m["train/grad_norm_clipped"] for m in peek.metrics[accumulate - 1 :: accumulate]]
    assert clipped == pytest.approx([min(n, 1.9) for n in norms], rel=1e-6)
    assert [float(g.norm()) for g in peek.gradients] == pytest.approx([min(n, 1.9) for n in norms], rel=1e-5)
    assert run.callback_metrics["train/clip_share"] == pytest.approx(sum(n > 1.9 for n in norms) / len(norms))
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)  # torch divides by norm + 1e-6


def batches_of(batches):
    return torch.utils.data.DataLoader(batches, batch_size=None)


def test_inf_measures_without_clipping(tmp_path):
    peek = Peek()
    trainer(tmp_path, GradientClipping(INF), peek, max_steps=3).fit(Tiny(lr=0.1), loader())
    for metrics, gradient in zip(peek.metrics, peek.gradients, strict=True):
        assert metrics["train/grad_norm"] == metrics["train/grad_norm_clipped"] == pytest.approx(float(gradient.norm()))


@pytest.mark.parametrize("fused", [False, True])
def test_true_units_under_a_gradient_scaler(tmp_path, fused):
    """The logged norm and the clipped step are those of a run without a scaler, for optimizers that unscale too."""

    def run(plugins):
        peek = Peek()
        model = Tiny(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused))
        trainer(tmp_path, GradientClipping(0.5), peek, max_steps=6, plugins=plugins).fit(model, loader())
        return [m["train/grad_norm"] for m in peek.metrics], [float(g.norm()) for g in peek.gradients], model

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
    norms, clipped, model = run([MixedPrecision("16-mixed", "cpu", scaler)])
    want, want_clipped, want_model = run([])
    assert norms == pytest.approx(want, rel=2e-2)  # half precision keeps 11 bits
    assert clipped == pytest.approx(want_clipped, rel=2e-2)
    for p, q in zip(model.parameters(), want_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_owns_non_finite_gradients(tmp_path, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    model = Tiny(poison={1}, value=INF, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=fused))
    clipping = GradientClipping(0.5, non_finite="error")
    run = trainer(tmp_path, clipping, max_steps=3, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    run.fit(model, loader())
    assert scaler.get_scale() == 2.0**9
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("value", [NAN, INF])
def test_error_names_the_update_and_a_parameter(tmp_path, value):
    model = Tiny(poison={2}, value=value)
    with pytest.raises(FloatingPointError, match=r"Update 2: the gradient of net\.0\.weight is not finite"):
        trainer(tmp_path, GradientClipping(), max_steps=5).fit(model, loader())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_error_names_the_first_culprit_not_the_first_parameter(tmp_path):
    class LastOnly(Tiny):
        def on_after_backward(self):
            self.net[3].bias.grad.fill_(NAN)

    with pytest.raises(FloatingPointError, match=r"Update 0: the gradient of net\.3\.bias"):
        trainer(tmp_path, GradientClipping(), max_steps=2).fit(LastOnly(), loader())


@pytest.mark.parametrize("fused", [False, True])
def test_skip_leaves_weights_and_moments_untouched(tmp_path, fused):
    """Equal to a run whose loader never had the poisoned batches, weight decay and moments included."""

    def run(model, batches, *callbacks):
        t = trainer(tmp_path, *callbacks)
        t.fit(model, batches_of(batches))
        return t

    def adam(ps):
        return torch.optim.AdamW(ps, lr=0.05, weight_decay=0.5, fused=fused)

    batches = list(loader())
    healthy = [b for i, b in enumerate(batches) if i not in (1, 2, 5)]
    want, got = Tiny(optimizer=adam), Tiny(optimizer=adam, poison={1, 2, 5})
    run(want, healthy, GradientClipping())
    clipping = GradientClipping(non_finite="skip")
    with pytest.warns(UserWarning, match=r"Skipped update 1: the gradient of net\.0\.weight is not finite"):
        ended = run(got, batches, clipping)
    assert clipping.skipped_updates == 3
    assert ended.callback_metrics["train/skipped_updates"] == 3
    for p, q in zip(got.parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q)


def test_too_many_skips_in_a_row_stop(tmp_path):
    clipping = GradientClipping(non_finite="skip", max_consecutive_skips=3)
    with (
        pytest.warns(UserWarning, match="Skipped"),
        pytest.raises(
            FloatingPointError, match=r"Update 6: 3 updates in a row were skipped, this one for net\.0\.weight"
        ),
    ):
        trainer(tmp_path, clipping, max_steps=16).fit(Tiny(poison={1, 2, 4, 5, 6}), loader())


def test_ignore_lets_them_through(tmp_path):
    model = Tiny(poison={1})
    trainer(tmp_path, GradientClipping(non_finite="ignore"), max_steps=3).fit(model, loader())
    assert all(torch.isnan(p).all() for p in model.parameters())


class OwnNorm(SingleDeviceStrategy):
    """A strategy that knows more than this process: other ranks hold the rest of a gradient of norm 4."""

    def global_grad_norm(self, parameters):
        assert all(p.grad is not None for p in parameters)
        return torch.tensor(4.0)


def test_the_strategys_own_norm_is_used(tmp_path):
    class Ones(Tiny):
        def on_after_backward(self):
            for p in self.parameters():
                p.grad.fill_(1.0)

    peek = Peek()
    run = trainer(tmp_path, GradientClipping(2.0), peek, max_steps=1, strategy=OwnNorm(device=torch.device("cpu")))
    run.fit(Ones(), loader())
    torch.testing.assert_close(peek.gradients[0], torch.full((21,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    assert peek.metrics[0]["train/grad_norm"] == 4.0


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"max_norm=1\.0\) and trainer\.gradient_clip_val=0\.5 would both clip"):
        trainer(tmp_path, GradientClipping(), max_steps=1, gradient_clip_val=0.5).fit(Tiny(), loader())
    with pytest.raises(ConfigError, match="max_norm=0"):
        GradientClipping(0)
    with pytest.raises(ConfigError, match="non_finite='zero'"):
        GradientClipping(non_finite="zero")
    with pytest.raises(ConfigError, match="max_consecutive_skips=0"):
        GradientClipping(max_consecutive_skips=0)

    class Sharded(SingleDeviceStrategy):
        pass

    Sharded.__name__ = FSDPStrategy.__name__
    run = trainer(tmp_path, GradientClipping(), max_steps=1, strategy=Sharded(device=torch.device("cpu")))
    with pytest.raises(ConfigError, match="cannot see the whole gradient under strategy=FSDPStrategy"):
        run.fit(Tiny(), loader())


def test_counts_go_on_after_a_resume(tmp_path):
    def run(max_steps, ckpt=None):
        clipping = GradientClipping(0.8, non_finite="skip")
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        model = Tiny(lr=0.1, poison={3})
        t = trainer(tmp_path, clipping, saver, max_steps=max_steps, enable_checkpointing=True)
        with pytest.warns(UserWarning):  # noqa: PT030 - the skip, or Lightning's note on loaders that cannot resume
            t.fit(model, loader(), ckpt_path=ckpt)
        return clipping.state_dict()

    first = run(8)
    assert first["skipped_updates"] == 1
    resumed = run(9, tmp_path / "step=8.ckpt")
    assert resumed["skipped_updates"] == 1
    assert resumed["updates"] == first["updates"] + 1


def test_fast_dev_run(tmp_path):
    run = trainer(tmp_path, GradientClipping(), fast_dev_run=True)
    run.fit(Tiny(), loader())
    assert "train/grad_norm" in run.callback_metrics


def test_manual_optimization_and_bf16_gradients(tmp_path):
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            x, y = batch
            self.manual_backward(((self(x.bfloat16()) - y.bfloat16()) ** 2).mean())
            optimizer.step()

    peek = Peek()
    run = trainer(tmp_path, GradientClipping(0.5), peek, max_steps=4)
    run.fit(Manual(lr=0.1).bfloat16(), loader())
    assert max(float(g.norm()) for g in peek.gradients) == pytest.approx(0.5, rel=1e-2)


class LateEvent:
    """A CUDA event that has not happened until somebody waits for it."""

    waits = 0

    def record(self):
        pass

    def query(self):
        return False

    def synchronize(self):
        LateEvent.waits += 1


class Late(GradientClipping):
    """As on a device that runs behind: nothing can be read at once."""

    def _reads_late(self, norm):
        return True


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "waits", 0)


def test_late_reading_clips_as_reading_at_once(tmp_path, late):
    at_once, delayed = Tiny(lr=0.1), Tiny(lr=0.1)
    trainer(tmp_path, GradientClipping(1.9), max_steps=12).fit(at_once, loader())
    run = trainer(tmp_path, Late(1.9), max_steps=12)
    run.fit(delayed, loader())
    for p, q in zip(at_once.parameters(), delayed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert LateEvent.waits == 12, "all are read at the end, none before"
    assert 0 < run.callback_metrics["train/clip_share"] < 1


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("gate", ["validation", "saving", "end"])
def test_late_reading_lets_nothing_out(tmp_path, late, gate, value):
    """A poisoned update is found before a validation, a checkpoint or a clean end, and the culprit is still known."""

    class LastOnly(Tiny):
        def on_after_backward(self):
            if self.trainer.global_step == 1:
                self.net[3].weight.grad[0, 2] = value

        def validation_step(self, batch, batch_idx):
            assert self.trainer.global_step < 2, "validated on poisoned weights"

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2 if gate == "saving" else 100)
    settings = {"val_check_interval": 2 if gate == "validation" else 16, "enable_checkpointing": True}
    run = trainer(tmp_path, Late(0.5), saver, max_steps=2 if gate == "end" else 8, **settings)
    # One update, then the check: later batches would spread the value over all weights.
    with pytest.raises(FloatingPointError, match=r"Update 1: the gradient of net\.3\.weight is not finite"):
        run.fit(LastOnly(lr=0.1), loader(), loader())
    assert not list(tmp_path.glob("*.ckpt"))
