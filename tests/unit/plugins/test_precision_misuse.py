"""What users do in and around a training step: it works, or is refused in a sentence; nothing is lost in silence."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import SGD, AdamW, SparseAdam

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from tests.support.precisions import Net, batches, by_hand, trainer

KINDS = ["bf16", "fp16"]


class Manual(Net):
    """Clips before the step, as Lightning's documentation shows."""

    automatic_optimization = False

    def __init__(self, *args: Any, algorithm: str = "norm", backwards: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.algorithm, self.backwards = algorithm, backwards

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(self.backwards):
            self.manual_backward((self.net(batch["x"]).float() - batch["y"]).square().mean() * batch["factor"])
            self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm=self.algorithm)
        optimizer.step()


class Watching(SGD):
    """Notes the gradients that it gets."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.got: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        self.got.append(torch.cat([g.flatten() for g in grads if g is not None]))
        return super().step(closure)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_manual_clipping_is_in_true_units(kind: Any, algorithm: str) -> None:
    data, plugin = batches(4), MasterWeightPrecision(kind)
    run = trainer(plugins=plugin)
    run.fit(Manual(lambda p: Watching(p, lr=0.0), batches=data, algorithm=algorithm))
    true = by_hand(data, kind, scale=plugin.loss_scale, make=lambda p: SGD(p, lr=0.0))[0]
    for got, gradients in zip(run.optimizers[0].got, true, strict=True):
        want = torch.cat([g.flatten() for g in gradients])
        want = want.clamp(-0.25, 0.25) if algorithm == "value" else want * min(1.0, 0.25 / float(want.norm()))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_an_overflow_that_manual_clipping_hides_is_found() -> None:
    """Clipped by value, an inf is a number like any other."""

    class Overflowing(Manual):
        def on_after_backward(self) -> None:
            optimizer: Any = self.optimizers()  # within the step the module shows the copies
            optimizer.param_groups[0]["params"][0].grad[0, 0] = float("inf")

    plugin = MasterWeightPrecision("fp16")
    module = Overflowing(batches=batches(1), algorithm="value")
    before = [p.detach().clone() for p in module.parameters()]
    trainer(plugins=plugin).fit(module)
    assert plugin.skipped_updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_manual_clipping_between_two_backward_passes() -> None:
    with pytest.raises(ConfigError, match="clip_gradients was called before the last backward pass of an update"):
        trainer(plugins=MasterWeightPrecision("fp16")).fit(Manual(batches=batches(1), backwards=2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_written_inside_a_step_holds_the_masters(kind: Any, tmp_path: Path) -> None:
    class Saving(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.net[0].weight.dtype != torch.float32
            self.trainer.save_checkpoint(tmp_path / "inside.ckpt")
            self.part = copy.deepcopy(self.net.state_dict())

    module = Saving(batches=batches(3))
    trainer(plugins=MasterWeightPrecision(kind), limit_val_batches=1).fit(module)
    saved = torch.load(tmp_path / "inside.ckpt", weights_only=True)["state_dict"]
    for name, weight in module.named_parameters():
        assert torch.equal(saved[name], weight), name
        assert torch.equal(module.part[name.removeprefix("net.")], weight), name
    assert not any(m._state_dict_hooks for m in module.modules())


def test_a_copy_of_a_module_made_while_training_is_independent() -> None:
    copies: list[nn.Module] = []

    class Copying(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            copies.append(copy.deepcopy(self.net))
            copies.append(pickle.loads(pickle.dumps(self.net)))

    trainer(plugins=MasterWeightPrecision("bf16")).fit(Copying(batches=batches(2)))
    for made in copies:
        for name, value in made.state_dict().items():
            assert torch.equal(value, made.get_parameter(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_changed_inside_a_step_is_refused(kind: Any) -> None:
    class Writing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.net[0].weight.div_(self.net[0].weight.norm())
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"net\.0\.weight was changed in place within a step, where it is a 16-bit"):
        trainer(plugins=MasterWeightPrecision(kind)).fit(Writing(batches=batches(2)))
    module = Writing(batches=batches(2))  # the way out that the message names
    trainer(plugins=MasterWeightPrecision(kind, keep_fp32=["net.0"])).fit(module)
    assert module.net[0].weight.norm().item() == pytest.approx(1, abs=0.1)  # and one small update


def test_parts_kept_in_float32_are_let_go_with_the_trainer() -> None:
    """A module that was trained once may be pickled, and trained with other parts, or none, in float32."""
    module = Net(batches=batches(2))
    trainer(plugins=MasterWeightPrecision("bf16", keep_fp32=["net.0", "net.2"])).fit(module)
    assert type(module.net[0]) is nn.Linear
    assert len(pickle.dumps(module.net)) > 0
    trainer(plugins=MasterWeightPrecision("bf16")).fit(module)
    trainer(plugins=MasterWeightPrecision("bf16", keep_fp32=["net.2"])).fit(module)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_with_running_statistics_stay_in_float32(kind: Any) -> None:
    class Normed(Net):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = self.net[1].weight.dtype
            return super().training_step(batch, batch_idx)

    module, plain = Normed(batches=batches(4)), Normed(batches=batches(4))
    plain.load_state_dict(module.state_dict())
    # The usual initial scale may overflow, and the update that is skipped then is missing in the statistics.
    scaler = DynamicLossScaler(initial_scale=64) if kind == "fp16" else None
    trainer(plugins=MasterWeightPrecision(kind, scaler=scaler), limit_val_batches=1).fit(module)
    trainer(limit_val_batches=1).fit(plain)
    assert module.seen == torch.float32
    # Of inputs about 1, rounded twice on the way, and of weights that follow rounded gradients.
    torch.testing.assert_close(module.net[1].running_mean, plain.net[1].running_mean, rtol=0, atol=2**-8)


def test_norms_with_running_statistics_have_to_be_named_where_a_strategy_gathers_weights() -> None:
    """Its policies go by name, and torch's error would not say which part it is."""
    module: Any = Net(batches=batches(1))
    module.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    strategy = SimpleNamespace(casts_weights=True, root_device=torch.device("cpu"))
    module._trainer = SimpleNamespace(strategy=strategy)
    with pytest.raises(ConfigError, match=r"net\.1 is a BatchNorm1d, .* precision\.keep_fp32 \(\[net\.1\]\)"):
        MasterWeightPrecision("bf16").convert_module(module)
    MasterWeightPrecision("bf16", keep_fp32=["net.1"]).convert_module(module)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients(kind: Any) -> None:
    class Rows(Net):
        def __init__(self, **settings: Any) -> None:
            super().__init__(lambda p: SparseAdam(list(p), lr=0.1), **settings)
            self.net = nn.Embedding(8, 4, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(torch.tensor([1, 2, 1])).float().square().mean() * batch["factor"]

    plugin = MasterWeightPrecision(kind)
    module = Rows(batches=batches(3, overflow=[2] if kind == "fp16" else []))
    before = module.net.weight.detach().clone()
    trainer(plugins=plugin, log_every_n_steps=1).fit(module)
    changed = (module.net.weight != before).any(dim=1)
    assert changed.tolist() == [False, True, True, *[False] * 5]
    assert bool(module.net.weight.isfinite().all())
    assert plugin.skipped_updates == (1 if kind == "fp16" else 0)


def test_weights_that_do_not_exist_yet() -> None:
    class Lazy(Net):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))

    with pytest.raises(ConfigError, match=r"cannot make a copy of net\.0\.weight, whose shape is not known yet"):
        trainer(plugins=MasterWeightPrecision("bf16")).fit(Lazy(batches=batches(1)))


@pytest.mark.parametrize("count", [1.5, "3", True, 0])
def test_counts_are_whole_numbers(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_consecutive_overflows=.* must be a whole number of at least 1"):
        MasterWeightPrecision("bf16", max_consecutive_overflows=count)


def test_other_settings_of_another_type() -> None:
    scaler: Any = {"growth_interval": 3}
    with pytest.raises(ConfigError, match=r"precision.scaler=\{.*\} must be a DynamicLossScaler"):
        MasterWeightPrecision("fp16", scaler=scaler)
    patterns: Any = [3]
    with pytest.raises(ConfigError, match=r"precision.keep_fp32=\[3\] must be a list of patterns"):
        MasterWeightPrecision("fp16", keep_fp32=patterns)


def test_one_skip_may_be_too_many() -> None:
    scaler = DynamicLossScaler(max_consecutive_skips=1)
    with pytest.raises(FloatingPointError, match="Update 2: 1 updates in a row were skipped"):
        trainer(plugins=MasterWeightPrecision("fp16", scaler=scaler)).fit(Net(batches=batches(4, overflow=[2])))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_frozen_and_unfrozen_on_the_way(kind: Any) -> None:
    """In one group all along; only what was trainable at an update has moved by it."""
    moved: list[bool] = []

    class Thawing(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx in (2, 3, 6))
            self.before = self.net[0].weight.detach().clone()

        def on_train_batch_end(self, *_: Any) -> None:
            moved.append(not torch.equal(self.before, self.net[0].weight))

    trainer(plugins=MasterWeightPrecision(kind)).fit(Thawing(batches=batches(8)))
    assert moved == [False, False, True, True, False, False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_validation_before_training_changes_nothing(kind: Any) -> None:
    first, other = Net(batches=batches(4)), Net(batches=batches(4))
    run = trainer(plugins=MasterWeightPrecision(kind), limit_val_batches=1)
    run.validate(first, verbose=False)
    run.fit(first)
    trainer(plugins=MasterWeightPrecision(kind), limit_val_batches=1).fit(other)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_without_training(kind: Any) -> None:
    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["x"])

        def predict_dataloader(self) -> Any:
            return self.val_dataloader()

    module = Predicting(batches=batches(1))
    (given,) = trainer(plugins=MasterWeightPrecision(kind)).predict(module) or []
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    assert given.dtype == narrow
    with torch.no_grad():
        assert torch.equal(given, copy.deepcopy(module.net).to(narrow)(batches(1)[0]["x"].to(narrow)))


def test_a_closure_with_its_own_backward() -> None:
    class Closing(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = (self.net(batch["x"]).float() - batch["y"]).square().mean()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    for kind in ("bf16", "fp16"):
        module, plugin = Closing(batches=batches(3)), MasterWeightPrecision(kind)
        trainer(plugins=plugin).fit(module)
        wanted = by_hand(batches(3), kind, scale=plugin.loss_scale)[1][-1]
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), wanted, strict=True))


AVERAGES: dict[str, Any] = {
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_weights(name: str, kind: Any) -> None:
    """They average the masters: the result is that of float32 up to 20 updates' roundings, and in float32."""
    found = []
    for given in ("fp32", kind):
        module = Net(batches=batches(4))
        run = trainer(
            plugins=MasterWeightPrecision(given), max_epochs=5, limit_val_batches=1, callbacks=[AVERAGES[name]()]
        )
        run.fit(module)
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    roundoff = {"bf16": 2.0**-8, "fp16": 2.0**-11}[kind]
    assert found[1].dtype == torch.float32
    assert 0 < (found[0] - found[1]).abs().max() <= 20 * roundoff * 0.1 * 4  # a gradient here is below 4


def test_float32_checkpoints_go_on_in_16_bits_and_back(tmp_path: Path) -> None:
    def fit(plugin: Any, epochs: int, resume: Path | None, save: Path) -> Any:
        run = trainer(plugins=plugin, max_epochs=epochs)
        run.fit(Net(functools.partial(AdamW, lr=1e-2), batches=batches(4)), ckpt_path=resume)
        run.save_checkpoint(save)
        return run

    fit(None, 1, None, tmp_path / "wide.ckpt")
    plugin = MasterWeightPrecision("fp16")
    run = fit(plugin, 2, tmp_path / "wide.ckpt", tmp_path / "narrow.ckpt")
    assert (run.global_step, plugin.loss_scale, plugin.scaler.clean_updates) == (8, 2.0**15, 4)
    assert {float(s["step"]) for s in run.optimizers[0].state.values()} == {8.0}
    run = fit(None, 3, tmp_path / "narrow.ckpt", tmp_path / "again.ckpt")
    assert run.global_step == 12
    assert {float(s["step"]) for s in run.optimizers[0].state.values()} == {12.0}
