"""Budgets: the update at which a run ends, by hand; the learning rate of its last update; the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import (
    ChinchillaBudget,
    RunCheckpoint,
    RunCounters,
    WarmupCosine,
    WarmupStableDecay,
    sort_callbacks,
)
from lit_pretrain.callbacks._measuring.budget_summary import count_parameters, describe, name_limits
from lit_pretrain.errors import ConfigError

TOKENS = 10  # of a batch


class Line(pl.LightningModule):
    """12 parameters: 10 in an embedding, 2 beside it."""

    flops_per_token = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(10, 1), nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.line(self.table(batch[0])) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logs(pl.Callback):
    """Figures that a project logs under names of its own."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in self.values.items():
            pl_module.log(name, value)


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


class Clock:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def fit(folder: Path, *callbacks: Any, ckpt_path: Path | None = None, **settings: Any) -> tuple[pl.Trainer, Line]:
    data = torch.utils.data.TensorDataset(torch.arange(400) % 10)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=settings.pop("max_epochs", 5),
        callbacks=sort_callbacks(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=settings.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Line()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return trainer, module


def test_parameters_are_counted_both_ways() -> None:
    assert count_parameters(Line()) == {"all": 12, "non_embedding": 2}


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"ratio": 20.0}, 24),  # 240 tokens, 10 an update
        ({"ratio": 20.1}, 25),  # 241.2 tokens: the update that reaches them
        ({"ratio": 20.0, "count": "non_embedding"}, 4),
        ({"ratio": None, "max_tokens": 70}, 7),
        ({"ratio": 20.0, "max_tokens": 1}, 1),
        ({"ratio": None, "max_flops": 1000.0}, 20),  # 5 FLOPs a token
    ],
)
def test_the_run_ends_with_the_update_that_reaches_the_limit(
    tmp_path: Path, settings: dict[str, Any], updates: int
) -> None:
    budget = ChinchillaBudget(**settings, tokens_per_batch=TOKENS)
    trainer, _ = fit(tmp_path, budget)
    assert trainer.global_step == updates
    assert budget.summary["tokens"] == updates * TOKENS
    assert budget.reason is not None


def test_windows_of_several_batches_count_whole(tmp_path: Path) -> None:
    """30 tokens an update: 240 are reached by the eighth."""
    trainer, _ = fit(tmp_path, ChinchillaBudget(tokens_per_batch=TOKENS), accumulate_grad_batches=3)
    assert trainer.global_step == 8


def test_the_rate_is_lowest_at_the_stop(tmp_path: Path) -> None:
    """A cosine over 240 tokens: warmup 2 of 24 updates; the last runs at a tenth of the peak, and no earlier one."""
    rates = Rates()
    schedule = WarmupCosine(warmup_steps=2, min_ratio=0.1, tokens_per_update=TOKENS)
    fit(tmp_path, schedule, ChinchillaBudget(tokens_per_batch=TOKENS), rates)
    assert len(rates.seen) == 24
    assert rates.seen[:2] == pytest.approx([0.05, 0.1])
    assert rates.seen[-1] == pytest.approx(0.01)
    assert min(rates.seen[:-1]) > 0.0101
    middle = 0.1 * (0.1 + 0.9 * 0.5)  # 13 updates done: half of the 22 that fall
    assert rates.seen[12] == pytest.approx(middle)


def test_a_schedule_with_an_end_of_its_own_is_refused(tmp_path: Path) -> None:
    schedule = WarmupCosine(warmup_steps=2, total_steps=100, tokens_per_update=TOKENS)
    with pytest.raises(ConfigError, match=r"schedule\.total_steps=100 and the run's budget"):
        fit(tmp_path, schedule, ChinchillaBudget(tokens_per_batch=TOKENS))


def test_time_ends_a_run_annealed(tmp_path: Path) -> None:
    """Two looks at the clock an update... the decay of a fifth begins early and is over when time is."""
    rates, clock = Rates(), Clock()
    counters = RunCounters(tokens_per_batch=TOKENS, clock=clock)
    budget = ChinchillaBudget(None, max_hours=100 / 3600)
    schedule = WarmupStableDecay(warmup_steps=2, decay_fraction=0.2, min_ratio=0.1, tokens_per_update=TOKENS)
    trainer, _ = fit(tmp_path, counters, budget, schedule, rates)
    assert counters.seconds <= 101  # one look more at the very end
    assert 90 <= trainer.global_step <= 100
    assert rates.seen[-1] == pytest.approx(0.01)
    assert rates.seen[2:70] == pytest.approx([0.1] * 68)
    falling = [r for r in rates.seen[2:] if r < 0.1]
    assert 0.15 * len(rates.seen) <= len(falling) <= 0.25 * len(rates.seen)


def test_money_is_time(tmp_path: Path) -> None:
    """3,600 an hour is one a second: 40 seconds, one an update."""
    counters = RunCounters(tokens_per_batch=TOKENS, clock=Clock())
    budget = ChinchillaBudget(None, max_cost=40.0, price_per_device_hour=3600.0)
    trainer, _ = fit(tmp_path, counters, budget)
    assert trainer.global_step == 40
    assert budget.summary["cost"] == pytest.approx(40.0, abs=1.0)


def test_a_gain_too_small_to_pay_for(tmp_path: Path) -> None:
    """By hand: 0.28 x 410.7 / D^1.28 / (6 x 12) nats a FLOP; at D = 100 tokens that is the threshold."""
    gain = 0.28 * 410.7 / 100**1.28 / (6 * 12)
    trainer, _ = fit(tmp_path, ChinchillaBudget(None, min_gain=gain * 1e18 * 1.0001, tokens_per_batch=TOKENS))
    assert trainer.global_step == 10


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ChinchillaBudget(tokens_per_batch=TOKENS)
    fit(tmp_path, budget)
    written = json.loads((tmp_path / "budget.json").read_text())
    assert written == budget.summary
    assert written["tokens_per_parameter"] == 20.0
    assert written["flops"] == 240 * 5.0
    law = 1.69 + 406.4 / 12**0.34 + 410.7 / 240**0.28
    assert written["predicted"]["Hoffmann et al. 2022"] == pytest.approx(law)
    said = capsys.readouterr().out
    assert "12 all, 2 non-embedding" in said
    assert "budget.ratio" in said


@pytest.mark.parametrize(
    ("logged", "loss", "expected"),
    [
        ({"train_loss": 3.0, "val_loss": 4.0}, None, ("val_loss", 4.0)),
        ({"train_loss": 3.0, "mine": 2.0}, None, ("train_loss", 3.0)),
        ({"train_loss": 3.0, "mine": 2.0}, "mine", ("mine", 2.0)),
        ({"train_loss": 3.0}, "mine", (None, None)),
        ({"val_loss": float("nan"), "loss": 1.0}, None, ("loss", 1.0)),
    ],
)
def test_the_loss_of_a_summary_is_the_one_that_is_logged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    logged: dict[str, float],
    loss: str | None,
    expected: tuple[str | None, float | None],
) -> None:
    budget = ChinchillaBudget(None, max_tokens=20, tokens_per_batch=TOKENS, loss=loss)
    fit(tmp_path, budget, Logs(**logged))
    assert (budget.summary["loss_name"], budget.summary["loss"]) == expected
    said = capsys.readouterr().out
    if expected[0] is None:
        assert "not known; name what the module logs with loss=" in said
    else:
        assert f"  {expected[0]:<24}{expected[1]:.4f} nats per token" in said


def test_a_resumed_run_ends_at_the_same_update(tmp_path: Path) -> None:
    """Stopped after 10 updates and resumed: 24 in all, and the last rate is still the lowest."""
    schedule = WarmupCosine(warmup_steps=2, min_ratio=0.1, tokens_per_update=TOKENS)
    first, _ = fit(tmp_path, schedule, ChinchillaBudget(max_tokens=100, tokens_per_batch=TOKENS))
    first.save_checkpoint(tmp_path / "ten.ckpt")
    rates = Rates()
    schedule = WarmupCosine(warmup_steps=2, min_ratio=0.1, tokens_per_update=TOKENS)
    budget = ChinchillaBudget(tokens_per_batch=TOKENS)
    again, _ = fit(tmp_path, schedule, budget, rates, ckpt_path=tmp_path / "ten.ckpt")
    assert again.global_step == 24
    assert len(rates.seen) == 14
    assert rates.seen[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "settings", [{"tokens_per_batch": TOKENS}, {"ratio": None, "max_hours": 23.5 / 3600, "tokens_per_batch": TOKENS}]
)
def test_a_run_that_is_over_is_not_trained_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    """24 updates by tokens or by the clock; a resume from its last checkpoint makes no update more."""
    first, module = fit(tmp_path, RunCounters(tokens_per_batch=TOKENS, clock=Clock()), ChinchillaBudget(**settings))
    assert first.global_step == 24
    first.save_checkpoint(tmp_path / "end.ckpt")
    budget = ChinchillaBudget(**settings)
    counters = RunCounters(tokens_per_batch=TOKENS, clock=Clock())
    again, resumed = fit(tmp_path, counters, budget, ckpt_path=tmp_path / "end.ckpt")
    assert again.global_step == 24
    assert counters.tokens == 240
    assert budget.summary["reason"] == budget.reason
    assert budget.reason is not None
    assert torch.equal(resumed.line.weight, module.line.weight)


def test_a_budget_that_comes_late_counts_from_the_start(tmp_path: Path) -> None:
    """Ten updates that nobody counted, and fourteen more."""
    first, _ = fit(tmp_path, max_steps=10)
    first.save_checkpoint(tmp_path / "ten.ckpt")
    budget = ChinchillaBudget(tokens_per_batch=TOKENS)
    with pytest.warns(UserWarning, match="holds no state of RunCounters: its 10 updates"):
        again, _ = fit(tmp_path, budget, ckpt_path=tmp_path / "ten.ckpt")
    assert again.global_step == 24
    assert budget.summary["tokens"] == budget.summary["tokens_read"] == 240
    assert budget.summary["flops"] == 240 * 5.0


@pytest.mark.parametrize("counters", [[], [RunCounters()]], ids=["its own", "bare ones"])
def test_the_update_of_a_checkpoint_is_counted_in_it(tmp_path: Path, counters: list[RunCounters]) -> None:
    def saving() -> RunCheckpoint:
        return RunCheckpoint(tmp_path / "saved", every_n_steps=10)

    fit(
        tmp_path,
        *counters,
        ChinchillaBudget(tokens_per_batch=TOKENS),
        saving(),
        enable_checkpointing=True,
        max_steps=10,
    )
    (saved,) = (tmp_path / "saved").glob("step-00000010*")
    budget = ChinchillaBudget(tokens_per_batch=TOKENS)
    again, _ = fit(tmp_path, *counters, budget, saving(), enable_checkpointing=True, ckpt_path=saved)
    assert again.global_step == 24
    assert budget.summary["updates"] == 24


def test_a_budget_ends_before_the_trainer_s_minimum(tmp_path: Path) -> None:
    """And the trainer keeps its minimum for the next run."""
    trainer, _ = fit(tmp_path, ChinchillaBudget(tokens_per_batch=TOKENS), min_steps=30)
    assert trainer.global_step == 24
    assert trainer.min_steps == 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": None}, "needs a limit"),
        ({"ratio": 0.0}, r"ratio=0\.0 must be a number above 0"),
        ({"ratio": float("nan")}, "ratio=nan must be a number above 0"),
        ({"ratio": True}, "ratio=True must be a number above 0"),
        ({"ratio": -1.0}, "ratio=-1.0 must be a number above 0"),
        ({"ratio": None, "max_cost": 3.0}, "needs budget.price_per_device_hour"),
        ({"law": "mine"}, "law='mine' is unknown"),
        ({"count": "some"}, "count='some' is unknown"),
        ({"tokens_per_batch": -1}, r"budget\.tokens_per_batch=-1 must be a whole number of at least 1"),
        ({"tokens_per_batch": float("nan")}, r"budget\.tokens_per_batch=nan must be a whole number"),
        ({"tokens_per_batch": "3"}, r"budget\.tokens_per_batch='3' must be a whole number"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChinchillaBudget(**settings)


def test_nobody_counts_tokens(tmp_path: Path) -> None:
    rates = Rates()
    with pytest.raises(ConfigError, match=r"budget\.tokens_per_batch"):
        fit(tmp_path, ChinchillaBudget(), rates)
    assert not rates.seen  # no update was made


def test_nothing_is_trained(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[ChinchillaBudget(tokens_per_batch=TOKENS)],
    )
    with pytest.raises(ConfigError, match=r"budget\.count=all counts no trained parameter"):
        trainer.fit(Line().requires_grad_(False), torch.utils.data.DataLoader(torch.arange(4) % 10))


def test_a_warmup_of_a_share_needs_nothing_else(tmp_path: Path) -> None:
    """The budget knows what an update uses, and tells the schedule: 240 tokens are 12 updates of 2 batches."""
    rates = Rates()
    budget, schedule = ChinchillaBudget(20, tokens_per_batch=TOKENS), WarmupCosine(warmup_fraction=0.25, min_ratio=0.1)
    trainer, _ = fit(tmp_path, budget, schedule, rates, accumulate_grad_batches=2)
    assert trainer.global_step == 12
    assert rates.seen[2] == pytest.approx(0.1)  # the peak, after 3 updates
    assert rates.seen[-1] == min(rates.seen[3:])
    assert rates.seen[-1] == pytest.approx(0.01, abs=2e-3)


def test_every_limit_is_named() -> None:
    said = name_limits({"ratio": 240.0, "max_tokens": 100.0}, {"max_hours": 7200.0, "max_cost": 3600.0}, max_cost=12.5)
    assert said == (
        "the first of 100 tokens (budget.max_tokens), 240 tokens (budget.ratio), 2h00m (budget.max_hours), 1h00m, 12.5 "
        "in money (budget.max_cost)"
    )
    assert name_limits({"ratio": 240.0}, {}, max_cost=None) == "240 tokens (budget.ratio)"


class NoLanguage(Line):
    flops_per_token = None  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "compared"), [(Line, True), (NoLanguage, False)])
def test_laws_of_text_speak_of_language_models_alone(tmp_path: Path, kind: type[Line], compared: bool) -> None:
    budget = ChinchillaBudget(20, tokens_per_batch=TOKENS)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=5,
        callbacks=[budget, Logs(val_loss=2.0)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(kind(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(400) % 10)))
    text = describe(budget.summary)
    assert ("predicted" in text) == compared
    assert ("2.0000 nats per token" in text) == compared
    assert ("far from the runs that these were fitted to: 70M to 16B parameters, 5B to 500B tokens" in text) == compared
