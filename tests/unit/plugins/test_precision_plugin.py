"""One process: what is computed, against the same training written by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from tests.support.precisions import DTYPES, Look, Net, batches, by_hand, trainer


def equal(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_and_weights_are_those_of_a_loop_by_hand(kind: Any, accumulate: int) -> None:
    """To the last bit: masters and accumulated gradients in float32, everything computed in 16 bits."""
    data = batches(6)
    look, plugin = Look(), MasterWeightPrecision(kind)
    run = trainer(plugins=plugin, callbacks=look, accumulate_grad_batches=accumulate)
    run.fit(Net(batches=data))
    gradients, weights = by_hand(data, kind, accumulate=accumulate, scale=plugin.loss_scale)
    equal(look.gradients, gradients)
    equal(look.weights[accumulate - 1 :: accumulate], weights)
    other = by_hand(data, "bf16" if kind == "fp16" else "fp16", accumulate=accumulate, scale=plugin.loss_scale)
    assert not torch.equal(weights[-1][0], other[1][-1][0]), "the case must tell the types apart"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_who_sees_what(kind: Any) -> None:
    seen: dict[str, Any] = {}

    class Curious(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen["inside"] = {p.dtype for p in self.parameters()}
            seen["output"] = self.net(batch["x"]).dtype
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            seen["outside"] = {p.dtype for p in self.parameters()}
            seen["gradients"] = {p.grad.dtype for p in self.parameters() if p.grad is not None}

    module = Curious(functools.partial(AdamW, lr=1e-3), batches=batches(3))
    before = list(module.parameters())
    run = trainer(plugins=MasterWeightPrecision(kind))
    run.fit(module)
    assert seen == {
        "inside": {DTYPES[kind]},
        "output": DTYPES[kind],
        "outside": {torch.float32},
        "gradients": {torch.float32},
    }
    after = list(module.parameters())
    assert all(a is b and isinstance(a, nn.Parameter) for a, b in zip(before, after, strict=True))
    held = [p for group in run.optimizers[0].param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(before, held, strict=True))
    states = [v for state in run.optimizers[0].state.values() for v in state.values()]
    assert {v.dtype for v in states} == {torch.float32}


OPTIMIZERS = {
    "SGD": functools.partial(SGD, lr=0.1, foreach=False),
    "SGD foreach": functools.partial(SGD, lr=0.1, foreach=True),
    "SGD fused": functools.partial(SGD, lr=0.1, fused=True),
    "AdamW": functools.partial(AdamW, lr=1e-2, foreach=False),
    "AdamW foreach": functools.partial(AdamW, lr=1e-2, foreach=True),
    "AdamW fused": functools.partial(AdamW, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_and_foreach_optimizers_get_true_gradients(name: str) -> None:
    """SGD tells a second unscaling by its size; a fused optimizer would be unscaled twice by torch's scaler."""
    data, look, plugin = batches(5), Look(), MasterWeightPrecision("fp16")
    trainer(plugins=plugin, callbacks=look).fit(Net(OPTIMIZERS[name], batches=data))
    _, weights = by_hand(data, "fp16", make=OPTIMIZERS[name], scale=plugin.loss_scale)
    equal(look.weights, weights)


def test_an_eager_first_validation_leaves_tensors_that_can_train() -> None:
    """The sanity check runs first, under inference mode."""
    data, look = batches(3), Look()
    run = trainer(plugins=MasterWeightPrecision("bf16"), callbacks=look, num_sanity_val_steps=1, limit_val_batches=1)
    run.fit(Net(batches=data))
    equal(look.weights, by_hand(data, "bf16")[1])
    # Validation computes with the copies of the last weights.
    narrow = Net(batches=data).net
    for p, value in zip(narrow.parameters(), look.weights[-1], strict=True):
        p.data = value.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = (narrow(data[0]["x"]).float() - data[0]["y"]).square().mean()
    assert run.callback_metrics["val"] == want


@pytest.mark.parametrize("edit", ["copy_", "data"])
def test_weights_changed_by_hand_reach_the_copies(edit: str) -> None:
    """A rollback, or an average of weights, writes the masters while no update tells."""
    seen: list[bool] = []

    class Editing(Net):
        def on_validation_batch_end(self, *_: Any) -> None:
            for p in self.parameters():
                if edit == "copy_":
                    with torch.no_grad():
                        p.zero_()
                else:
                    p.data = torch.zeros_like(p)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(bool((self.net(batch["x"]) == 0).all()))

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches(3), batch_size=None)

    run = trainer(plugins=MasterWeightPrecision("bf16"), limit_val_batches=3, val_check_interval=1)
    run.fit(Editing(batches=batches(1)))
    assert seen == [False, True, True]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_masters_keep_updates_that_16_bits_lose(kind: Any) -> None:
    """10,000 updates of 2^-12 of a weight of 1: a step of bf16 there is 2^-7, of fp16 2^-10, so each is rounded away.

    With masters 1 + 10,000 2^-12 = 3.44140625 exactly: 14 bits are enough for every sum on the way.
    """
    from lit_pretrain.plugins.working_copies import WorkingCopies

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

    updates, step = 10_000, 2.0**-12
    module = One()
    copies = WorkingCopies(module, DTYPES[kind])
    optimizer = SGD(module.parameters(), lr=step)
    pure = One().to(DTYPES[kind])
    pure_optimizer = SGD(pure.parameters(), lr=step)
    for _ in range(updates):
        optimizer.zero_grad()
        with copies.inserted():
            (-module.w).sum().backward()
        optimizer.step()
        pure_optimizer.zero_grad()
        (-pure.w).sum().backward()
        pure_optimizer.step()
    assert module.w.item() == 1 + updates * step == 3.44140625
    assert pure.w.item() == 1.0
    with copies.inserted():
        assert module.w.item() == torch.tensor(3.44140625).to(DTYPES[kind]).item()


@pytest.mark.slow
def test_masters_keep_small_updates_in_a_trainer() -> None:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__(lambda p: SGD(p, lr=2.0**-12), batches=batches(1) * 10_000)
            self.net = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.net.weight)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return -self.net(torch.ones(1)).float().sum()

    found = {}
    for name, settings in {
        "masters": {"plugins": MasterWeightPrecision("bf16")},
        "pure": {"precision": "bf16-true"},
    }.items():
        module = Small()
        trainer(**settings).fit(module)
        found[name] = module.net.weight.item()
    assert found == {"masters": 3.44140625, "pure": 1.0}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputed_activations_are_16_bit_too(mode: Any) -> None:
    from lit_pretrain.module import GPTModule
    from tests.support.parity import config, global_batches

    class Once(GPTModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(global_batches(updates=2, rows=2), batch_size=None)

    def run(mode: Any) -> list[torch.Tensor]:
        module = Once(config("llama", tied=False), seed=5, activation_checkpointing=mode)
        trainer(plugins=MasterWeightPrecision("bf16")).fit(module)
        return list(module.parameters())

    equal([run(mode)], [run("none")])


@pytest.mark.slow
def test_compiled_blocks() -> None:
    from lit_pretrain.module import GPTModule
    from tests.support.parity import config, global_batches

    class Once(GPTModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(global_batches(updates=3, rows=2), batch_size=None)

    weights = []
    for compiled in (False, True):
        module = Once(
            config("gpt2", tied=True), seed=5, compile=compiled, optimizer=lambda m: SGD(m.parameters(), lr=0.1)
        )
        trainer(plugins=MasterWeightPrecision("bf16")).fit(module)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    # Fused kernels round elsewhere: 3 updates of 0.1 g, each g within some 2^-8 of a norm below 4.
    assert (weights[0] - weights[1]).norm() <= 3 * 0.1 * 4 * 2**-8 * 2


def test_manual_optimization_computes_with_fresh_copies_within_one_step() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward((self.net(batch["x"]).float() - batch["y"]).square().mean())
                optimizer.step()

    data = batches(2)
    for kind in ("bf16", "fp16"):
        module, plugin = Manual(batches=data), MasterWeightPrecision(kind)
        trainer(plugins=plugin).fit(module)
        twice = [batch for batch in data for _ in range(2)]
        wanted = by_hand(twice, kind, scale=plugin.loss_scale)[1][-1]
        equal([list(module.parameters())], [wanted])


def test_tied_and_frozen_weights() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(batches=batches(2))
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
            self.net[1].weight = self.net[0].weight
            self.net[2].weight.requires_grad_(False)
            self.same: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.same.append(self.net[1].weight is self.net[0].weight)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    module, plugin = Tied(), MasterWeightPrecision("bf16")
    frozen, tied = module.net[2].weight.clone(), module.net[0].weight.clone()
    run = trainer(plugins=plugin)
    sizes: list[int] = []
    module.on_train_batch_end = lambda *_: sizes.append(plugin.working_copy_bytes)  # type: ignore[method-assign]
    run.fit(module)
    assert module.same == [True, True]
    assert torch.equal(module.net[2].weight, frozen)
    assert not torch.equal(module.net[0].weight, tied)
    assert sizes[-1] == 2 * sum(p.numel() for p in module.parameters())  # the tied one counts once


def test_scale_follows_the_table_in_a_real_run() -> None:
    """Batches 2, 6 and 7 overflow; interval 3 from 8: written by hand."""
    data, look = batches(12, overflow=(2, 6, 7)), Look()
    scaler = DynamicLossScaler(initial_scale=8, growth_interval=3)
    module = Net(batches=data)
    trainer(plugins=MasterWeightPrecision("fp16", scaler=scaler), callbacks=look).fit(module)
    assert look.scales == [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4, 4]
    assert [i for i, skipped in enumerate(look.skipped) if skipped] == [2, 6, 7]
    assert scaler.skipped_updates == 3
