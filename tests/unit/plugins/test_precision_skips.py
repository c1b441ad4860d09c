"""Updates that are skipped, and runs that are stopped; clipping and logging beside them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, AdamW

from lit_pretrain.callbacks import GradientClipping, RunCounters, WarmupCosine, sort_callbacks
from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from lit_pretrain.plugins.gradient_checks import share, underflow
from tests.support.precisions import Look, Net, batches, by_hand, trainer


class Scheduled(Net):
    """With a scheduler of Lightning's kind: a step per update, and one per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


class State(Look):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.steps: list[float] = []
        self.last_epochs: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        (optimizer,) = trainer.optimizers
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.steps.append(max((float(s["step"]) for s in optimizer.state.values()), default=0.0))
        self.last_epochs.extend(c.scheduler.last_epoch for c in trainer.lr_scheduler_configs)


def test_a_skipped_update_touches_nothing() -> None:
    """Lightning steps schedulers whether or not a scaler skipped; here update 2 of 5 leaves them."""
    state = State()
    trainer(plugins=MasterWeightPrecision("fp16"), callbacks=state).fit(Scheduled(batches=batches(5, overflow=[2])))
    assert state.skipped == [False, False, True, False, False]
    assert state.steps == [1, 2, 2, 3, 4]
    assert state.last_epochs == [1, 2, 2, 3, 4]
    assert state.rates == pytest.approx([5e-3, 2.5e-3, 2.5e-3, 1.25e-3, 6.25e-4])
    assert all(torch.equal(a, b) for a, b in zip(state.weights[1], state.weights[2], strict=True))
    assert not torch.equal(state.weights[2][0], state.weights[3][0])


def test_the_run_goes_on_as_if_the_batch_had_not_been() -> None:
    look, without = Look(), batches(5, overflow=[2])
    trainer(plugins=MasterWeightPrecision("fp16"), callbacks=look).fit(Net(batches=without))
    clean = [b for i, b in enumerate(batches(5)) if i != 2]
    # A power of two rounds nothing, so another scale gives the same gradients where none of them is subnormal.
    _, weights = by_hand(clean, "fp16", scale=2.0**15)
    for mine, theirs in zip(look.weights[-1], weights[-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_counters_of_applied_updates_stay_and_tokens_read_move_on() -> None:
    counters, schedule = RunCounters(tokens_per_batch=10), WarmupCosine(warmup_steps=1, total_steps=10)
    run = trainer(
        plugins=MasterWeightPrecision("fp16"),
        callbacks=sort_callbacks([counters, schedule, GradientClipping(1.0)]),
        accumulate_grad_batches=2,
    )
    run.fit(Net(batches=batches(10, overflow=[4])))  # the third of five updates
    assert (counters.updates, counters.tokens, counters.tokens_read) == (4, 80, 100)
    assert schedule.applied_updates == 4
    assert run.global_step == 5  # Lightning counts attempts, also under its own scaler


def test_an_overflow_inside_a_window_skips_the_window_once() -> None:
    look = Look()
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(growth_interval=2))
    trainer(plugins=plugin, callbacks=look, accumulate_grad_batches=3).fit(Net(batches=batches(9, overflow=[3, 4])))
    assert plugin.skipped_updates == 1
    assert look.scales[2::3] == [2.0**15, 2.0**14, 2.0**14]


def test_skips_in_a_row_stop_the_run_and_say_where() -> None:
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(max_consecutive_skips=3))
    module = Net(batches=batches(9, overflow=range(4, 9)))
    with pytest.raises(FloatingPointError) as raised:
        trainer(plugins=plugin).fit(module)
    text = str(raised.value)
    # Updates are counted from 0: 4, 5 and 6 are skipped, at 2^15, 2^14 and 2^13.
    assert text.startswith("Update 6: 3 updates in a row were skipped")
    assert "at a loss scale of 8192 the gradient of net.0.weight is not finite" in text
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_the_floor_stops_the_run() -> None:
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(initial_scale=2, min_scale=1))
    with pytest.raises(FloatingPointError, match=r"Update 1: the loss scale is at its floor of 1 .*net\.0\.weight"):
        trainer(plugins=plugin).fit(Net(batches=batches(4, overflow=range(4))))


def test_an_overflow_of_the_scale_alone_is_found_and_cured() -> None:
    """Finite in true units and beyond float16 when scaled: the scale falls until it fits, nothing is lost."""
    look, plugin = Look(), MasterWeightPrecision("fp16", scaler=DynamicLossScaler(initial_scale=2.0**24))
    trainer(plugins=plugin, callbacks=look).fit(Net(lambda p: SGD(p, lr=0.0), batches=batches(1) * 20))
    assert 0 < plugin.skipped_updates < 20
    assert look.skipped[: plugin.skipped_updates] == [True] * plugin.skipped_updates
    assert not any(look.skipped[plugin.skipped_updates :])
    assert look.scales[-1] == 2.0 ** (24 - plugin.skipped_updates)


def test_overflows_of_bf16_are_counted_reported_and_left_to_the_guard() -> None:
    plugin = MasterWeightPrecision("bf16")
    guard = GradientClipping(1.0, non_finite="skip")
    with pytest.warns(UserWarning, match=r"Update 2: the gradient of net\.0\.weight is not finite \(1 such updates"):
        trainer(plugins=plugin, callbacks=guard).fit(Net(batches=batches(5, overflow=[2])))
    assert (plugin.overflows, guard.skipped_updates) == (1, 1)
    assert plugin.state_dict() == {"overflows": {"total": 1, "in_a_row": 0}}


def test_overflows_of_bf16_in_a_row_stop_the_run() -> None:
    plugin = MasterWeightPrecision("bf16", max_consecutive_overflows=2)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(
            FloatingPointError, match=r"Update 3: 2 updates in a row .* net\.0\.weight, at a loss scale of 1"
        ),
    ):
        trainer(plugins=plugin).fit(Net(batches=batches(5, overflow=[2, 3])))


@pytest.mark.parametrize("by", ["trainer", "callback"])
def test_clipping_is_in_true_units(by: str) -> None:
    """The gradient that the optimizer gets has the norm asked for, whatever the scale."""
    got: list[float] = []

    class Watching(SGD):
        def step(self, closure: Any = None) -> Any:
            grads = [p.grad for g in self.param_groups for p in g["params"]]
            got.append(torch.cat([g.flatten() for g in grads if g is not None]).norm().item())
            return super().step(closure)

    settings: dict[str, Any] = {"gradient_clip_val": 0.25} if by == "trainer" else {"callbacks": GradientClipping(0.25)}
    data, plugin = batches(4), MasterWeightPrecision("fp16")
    run = trainer(plugins=plugin, log_every_n_steps=1, **settings)
    run.fit(Net(lambda p: Watching(p, lr=0.0), batches=data))
    true = [
        torch.cat([g.flatten() for g in gs]).norm().item()
        for gs in by_hand(data, "fp16", scale=2.0**15, make=lambda p: SGD(p, lr=0.0))[0]
    ]
    assert max(true) > 0.25, "the case must clip"
    assert got == pytest.approx([min(t, 0.25) for t in true], rel=1e-4)
    if by == "callback":
        assert run.callback_metrics["train/grad_norm"] == pytest.approx(true[-1], rel=1e-6)


def test_underflow_shares_by_hand() -> None:
    """float16 is normal from 2^-14 on. At a scale of 4: two of six are below it as they are, four in true units."""
    scaled = torch.tensor([0.0, 2.0**-20, 2.0**-14, -(2.0**-13), 2.0**-12, -1.0])
    counts = underflow([scaled[:3], scaled[3:]], scale=4.0, dtype=torch.float16, device=torch.device("cpu"))
    assert counts.tolist() == [2.0, 4.0, 6.0]
    assert share(counts, world_size=1) == (2 / 6, 4 / 6)


def test_figures_are_logged(tmp_path: Any) -> None:
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(initial_scale=8, growth_interval=2))
    run = trainer(plugins=plugin, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(Net(batches=batches(4, overflow=[2])))
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    table = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    # The scale that the update was computed with.
    assert [float(row["precision/loss_scale"]) for row in table] == [8, 8, 16, 8]
    assert [float(row["precision/skipped_updates"]) for row in table] == [0, 0, 1, 1]
    shares = [(float(r["precision/underflow_scaled"]), float(r["precision/underflow_unscaled"])) for r in table]
    assert all(0 <= low <= lost < 1 for low, lost in shares[:2])

    bf16 = trainer(plugins=MasterWeightPrecision("bf16"), log_every_n_steps=1)
    bf16.fit(Net(batches=batches(2)))
    assert bf16.logged_metrics["precision/overflows"] == 0
    assert "precision/loss_scale" not in bf16.logged_metrics
