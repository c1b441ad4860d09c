from __future__ import annotations

import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_pretrain.callbacks import (
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
    sort_callbacks,
)
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Rates, Tiny, loader, trainer

R = math.sqrt(0.5)
# warmup 4, horizon 8, minimum 10%: worked out by hand in tests/unit/schedules.
COSINE = [0.25, 0.5, 0.75, 1.0, 0.1 + 0.45 * (1 + R), 0.55, 0.1 + 0.45 * (1 - R), 0.1, 0.1, 0.1]


def fit(tmp_path, schedule, *others, model=None, data=None, ckpt=None, **settings):
    rates = Rates()
    run = trainer(tmp_path, schedule, *others, rates, **settings)
    run.fit(model or Tiny(), loader() if data is None else data, ckpt_path=ckpt)
    return rates, run


def test_cosine_over_updates(tmp_path):
    rates, run = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), max_steps=10)
    assert rates.first_group == pytest.approx(COSINE, abs=1e-15)
    assert run.callback_metrics["optim/lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (WarmupLinear(warmup_steps=2, min_ratio=0.2), [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            WarmupStableDecay(warmup_steps=2, decay_fraction=0.5, shape="linear", min_ratio=0.1),
            [0.5, 1, 1, 0.7, 0.4, 0.1],
        ),
        (WarmupInverseSqrt(warmup_steps=1), [1.0, R, 3**-0.5, 0.5, 5**-0.5, 6**-0.5]),
        (WarmupConstant(warmup_steps=3), [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (WarmupCosine(warmup_fraction=0.5, start_ratio=0.5), [0.5, 0.75, 1.0, 0.775, 0.325, 0.1]),
        (WarmupCosine(warmup_fraction=0.5, start_lr=0.5), [0.5, 0.75, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_every_curve_with_the_horizon_from_the_trainer(tmp_path, schedule, want):
    rates, _ = fit(tmp_path, schedule, max_steps=6)
    assert rates.first_group == pytest.approx(want, abs=1e-15)


def test_horizon_from_epochs_counts_updates_not_microbatches(tmp_path):
    # 16 batches, 4 of them an update, 2 epochs: 8 updates.
    schedule = WarmupCosine(warmup_steps=4)
    rates, _ = fit(tmp_path, schedule, max_epochs=2, accumulate_grad_batches=4)
    assert rates.first_group[::4] == pytest.approx(COSINE[:8], abs=1e-15)
    assert all(len(set(rates.first_group[i : i + 4])) == 1 for i in range(0, 32, 4))
    assert schedule.applied_updates == 8


def test_a_debugging_limit_does_not_bend_a_given_horizon(tmp_path):
    rates, _ = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), max_steps=3)
    assert rates.first_group == pytest.approx(COSINE[:3])
    rates, _ = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), fast_dev_run=2)
    assert rates.first_group == pytest.approx(COSINE[:2])


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(warmup_steps=1000),
        WarmupStableDecay(warmup_steps=1000, decay_fraction=0.5),
        WarmupLinear(warmup_tokens=10**6, tokens_per_update=100),
        WarmupStableDecay(warmup_fraction=0.5),
    ],
)
def test_fast_dev_run_needs_no_room_for_the_warmup(tmp_path, schedule):
    rates, _ = fit(tmp_path, schedule, fast_dev_run=2)
    assert 0 < rates.first_group[0] < rates.first_group[1] <= 0.04


def groups(model_lr=1.0):
    def make(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.5, "name": "a"}, {"params": rest, "name": "b"}], lr=2.0)

    return make


def test_every_group_has_its_own_peak(tmp_path):
    rates, run = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), model=Tiny(optimizer=groups()), max_steps=9)
    assert [a for a, _ in rates.seen] == pytest.approx([0.5 * f for f in COSINE[:9]], abs=1e-15)
    assert [b for _, b in rates.seen] == pytest.approx([2.0 * f for f in COSINE[:9]], abs=1e-15)
    assert run.callback_metrics["optim/lr/a"] == pytest.approx(0.05)
    assert run.callback_metrics["optim/lr/b"] == pytest.approx(0.2)


class Tokens(LightningDataModule):
    def __init__(self, tokens_per_update):
        super().__init__()
        self.tokens_per_update = tokens_per_update

    def train_dataloader(self):
        return loader()


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(warmup_tokens=400, total_tokens=800),
        WarmupCosine(warmup_steps=4, total_tokens=800),
        WarmupCosine(warmup_fraction=0.5, total_tokens=800),
        WarmupCosine(warmup_tokens=400, total_steps=8),
    ],
)
def test_tokens(tmp_path, schedule):
    rates, _ = fit(tmp_path, schedule, data=Tokens(100), max_steps=10)
    assert rates.first_group == pytest.approx(COSINE, abs=1e-15)
    assert schedule.applied_tokens == 1000


def test_tokens_need_somebody_who_knows_them(tmp_path):
    with pytest.raises(ConfigError, match="tokens_per_update"):
        fit(tmp_path, WarmupCosine(warmup_tokens=400, total_tokens=800), max_steps=10)
    rates, _ = fit(tmp_path, WarmupCosine(warmup_tokens=400, total_tokens=800, tokens_per_update=100), max_steps=10)
    assert rates.first_group == pytest.approx(COSINE, abs=1e-15)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "Exactly one of .* not none"),
        ({"warmup_steps": 1, "warmup_fraction": 0.1}, "warmup_steps=1 and schedule.warmup_fraction=0.1"),
        ({"warmup_steps": 1, "total_steps": 5, "total_tokens": 5}, "total_steps=5 and schedule.total_tokens=5"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 1, "total_steps": 0}, "total_steps=0"),
        ({"warmup_fraction": 1.1}, "warmup_fraction=1.1"),
        ({"warmup_steps": 1, "min_ratio": 2.0}, "min_ratio=2.0"),
        ({"warmup_steps": 1, "start_ratio": 0.0}, "start_ratio=0.0"),
        ({"warmup_steps": 1, "start_lr": 0.0}, "start_lr=0.0"),
        ({"warmup_steps": 1, "start_lr": 0.1, "start_ratio": 0.1}, "exclude each other"),
        ({"warmup_steps": 1, "tokens_per_update": 0}, "tokens_per_update=0"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ConfigError, match=words):
        WarmupCosine(**settings)


def test_refusals_before_the_first_step(tmp_path):
    class Never(Callback):
        def on_train_batch_start(self, *_):
            pytest.fail("a step was taken")

    def with_scheduler(ps):
        optimizer = torch.optim.SGD(ps, lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def refused(words, *callbacks, model=None, **settings):
        with pytest.raises(ConfigError, match=words):
            trainer(tmp_path, *callbacks, Never(), **settings).fit(model or Tiny(), loader())

    refused("max_steps=-1, trainer.max_epochs=-1", WarmupCosine(warmup_steps=1), max_epochs=-1)
    refused("warmup=9 must not exceed schedule.total=8", WarmupCosine(warmup_steps=9, total_steps=8), max_steps=8)
    refused(
        "WarmupCosine and the scheduler of Tiny.configure_optimizers .StepLR.",
        WarmupCosine(warmup_steps=1),
        model=Tiny(optimizer=with_scheduler),
        max_steps=8,
    )
    refused("WarmupCosine and WarmupLinear", WarmupCosine(warmup_steps=1), WarmupLinear(warmup_steps=1), max_steps=8)


def test_an_endless_iterable_without_max_steps_is_refused(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(3), torch.zeros(1)

    data = torch.utils.data.DataLoader(Endless(), batch_size=2)
    with pytest.raises(ConfigError, match="needs an end"):
        trainer(tmp_path, WarmupCosine(warmup_steps=1), max_epochs=1).fit(Tiny(), data)
    rates, _ = fit(tmp_path, WarmupConstant(warmup_steps=2), data=data, max_epochs=1, limit_train_batches=3)
    assert rates.first_group == [0.5, 1.0, 1.0]


class CutAt(Callback):
    def __init__(self, at, action):
        self.at, self.action = at, action

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.at:
            self.action(trainer)


def schedule_of(run):
    return next(c for c in run.callbacks if hasattr(c, "cut"))


def test_cuts_survive_and_end(tmp_path):
    def cut(run):
        schedule_of(run).cut(0.5, until_update=6)
        schedule_of(run).cut(0.25)

    rates, _ = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), CutAt(2, cut), max_steps=8)
    cuts = [1, 1, 0.125, 0.125, 0.125, 0.125, 0.25, 0.25]
    assert rates.first_group == pytest.approx([f * c for f, c in zip(COSINE, cuts, strict=False)], abs=1e-15)


def test_a_rate_that_somebody_else_changes_is_kept_as_a_factor_and_told_once(tmp_path):
    def halve(run):
        for group in run.optimizers[0].param_groups:
            group["lr"] /= 2

    with pytest.warns(
        UserWarning, match=r"changed the learning rate of parameter group 0 from 0\.5 to 0\.25"
    ) as caught:
        rates, _ = fit(
            tmp_path,
            WarmupCosine(warmup_steps=4, total_steps=8),
            CutAt(2, halve),
            CutAt(5, halve),
            max_steps=8,
        )
    assert sum("changed the learning rate" in str(w.message) for w in caught) == 1
    # Rates notes what stands after the batch; the edit at update 2 is made before Rates reads (it comes last).
    cuts = [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert rates.first_group == pytest.approx([f * c for f, c in zip(COSINE, cuts, strict=False)], abs=1e-15)


@pytest.mark.parametrize("schedule", [{"warmup_steps": 4}, {"warmup_tokens": 400, "tokens_per_update": 100}])
def test_resume_equals_the_uninterrupted_run(tmp_path, schedule):
    def cut(run):
        schedule_of(run).cut(0.5)
        run.optimizers[0].param_groups[0]["lr"] *= 0.7

    def run(max_steps, ckpt=None, *, every=None, **settings):
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every or 3, save_top_k=-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rates, _ = fit(
                tmp_path,
                WarmupCosine(**schedule),
                CutAt(2, cut),
                saver,
                model=Tiny(optimizer=groups()),
                ckpt=ckpt,
                max_steps=max_steps,
                enable_checkpointing=True,
                **settings,
            )
        return rates.seen

    whole = run(12)
    # The first part was started for 12 updates and killed at 3; its checkpoint goes into a fresh trainer.
    assert run(12, tmp_path / "step=3.ckpt") == whole[3:]
    # The horizon was derived once: a trainer that would run longer does not stretch the curve.
    longer = run(16, tmp_path / "step=9.ckpt", every=100)
    assert longer[:3] == whole[9:]
    assert longer[3:] == [whole[-1]] * 4


def test_resume_warns_when_peaks_or_horizon_changed(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, WarmupCosine(warmup_steps=1), saver, max_steps=4, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="peak") as caught:
        rates, _ = fit(
            tmp_path, WarmupCosine(warmup_steps=1), model=Tiny(lr=3.0), ckpt=tmp_path / "step=2.ckpt", max_steps=6
        )
    told = " ".join(str(w.message) for w in caught)
    assert "peak learning rates [1.0] are used, not the configured [3.0]" in told
    assert "keeps the horizon of 4 updates" in told
    assert rates.first_group == pytest.approx([0.325, 0.1, 0.1, 0.1])


def test_a_checkpoint_without_our_state_goes_on_from_the_trainers_step(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, saver, max_steps=2, enable_checkpointing=True).fit(Tiny(), loader())
    with pytest.warns(UserWarning, match="holds no state of WarmupCosine; it starts at update 2"):
        rates, _ = fit(
            tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), ckpt=tmp_path / "step=2.ckpt", max_steps=8
        )
    assert rates.first_group == pytest.approx(COSINE[2:8])


def test_another_curve_takes_over(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fit(tmp_path, WarmupConstant(warmup_steps=4), saver, max_steps=5, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="WarmupCosine goes on where WarmupConstant stopped"):
        rates, _ = fit(
            tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), ckpt=tmp_path / "step=5.ckpt", max_steps=8
        )
    assert rates.first_group == pytest.approx(COSINE[5:8])


def test_rewind_takes_the_counter_back_and_leaves_the_cuts(tmp_path):
    def back(run):
        if not seen:
            seen.append(True)
            schedule_of(run).cut(0.5)
            schedule_of(run).rewind(applied_updates=2, applied_tokens=0)
            run.optimizers[0].param_groups[0]["lr"] = 123.0  # what restoring an optimizer leaves behind

    seen = []
    rates, _ = fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), CutAt(5, back), max_steps=8)
    assert rates.first_group[5:] == pytest.approx([0.5 * f for f in COSINE[2:5]])


class Drop(Callback):
    """Drops updates the way a guard does: by taking the gradients away."""

    def __init__(self, at):
        self.at = at

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step in self.at:
            for p in pl_module.parameters():
                p.grad = None


def test_a_dropped_update_does_not_count(tmp_path):
    schedule = WarmupCosine(warmup_steps=4, total_steps=8)
    rates, _ = fit(tmp_path, schedule, Drop({1, 4}), max_steps=8)
    assert rates.first_group == pytest.approx([COSINE[u] for u in (0, 1, 1, 2, 3, 3, 4, 5)])
    assert schedule.applied_updates == 6


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_the_gradient_scaler_skips_does_not_count(tmp_path, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    model = Tiny(poison={1, 4}, value=float("inf"), optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=fused))
    schedule = WarmupCosine(warmup_steps=4, total_steps=8)
    rates, run = fit(tmp_path, schedule, model=model, max_steps=8, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert rates.first_group == pytest.approx([1e-2 * COSINE[u] for u in (0, 1, 1, 2, 3, 3, 4, 5)])
    assert schedule.applied_updates == 6
    assert run.global_step == 8
    assert scaler.get_scale() == 2.0**8


def test_rates_in_tensors(tmp_path):
    model = Tiny(optimizer=lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1.0)))
    seen = []

    class Note(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"].item())

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*changed the learning rate.*")
        fit(tmp_path, WarmupCosine(warmup_steps=4, total_steps=8), Note(), model=model, max_steps=10)
    assert seen == pytest.approx(COSINE, rel=1e-6)


def test_nothing_stays_on_the_optimizer(tmp_path):
    _, run = fit(tmp_path, WarmupCosine(warmup_steps=1), max_steps=2)
    assert not run.optimizers or not run.optimizers[0]._optimizer_step_post_hooks


def test_one_callback_object_in_two_runs(tmp_path):
    schedule = WarmupCosine(warmup_steps=4, total_steps=8)
    first, _ = fit(tmp_path, schedule, max_steps=3)
    second, _ = fit(tmp_path, schedule, max_steps=3)
    assert first.seen == second.seen


def test_order():
    saver, theirs, schedule = ModelCheckpoint(), Rates(), WarmupCosine(warmup_steps=1)
    assert sort_callbacks([saver, theirs, schedule]) == [schedule, theirs, saver]


def test_a_rate_is_logged_once_per_update(tmp_path):
    logger = CSVLogger(tmp_path)
    schedule = WarmupLinear(warmup_steps=2)
    t = trainer(
        tmp_path, schedule, max_steps=4, accumulate_grad_batches=3, logger=logger, log_every_n_steps=1, max_epochs=-1
    )
    logged = []
    logger.log_metrics = lambda metrics, step=None: logged.append((step, metrics.get("optim/lr")))
    t.fit(Tiny(), loader())
    assert [step for step, rate in logged if rate is not None] == [0, 1, 2, 3]
