"""16-bit training on the device: near float32 on the CPU, exact where it has to be, and as large as it says."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from tests.support.precision_runs import compare, relative_error, train
from tests.support.precisions import Look, Net, batches, by_hand, trainer

UPDATES = 20


@functools.cache
def exact() -> dict[str, Any]:
    """In float32 on the CPU: no kernel in common."""
    return train("auto", "fp32", updates=UPDATES)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_plugin_stays_near_float32(accelerator: str, kind: str) -> None:
    got = train("auto", kind, updates=UPDATES, accelerator=accelerator)
    assert max(compare(got, exact(), error=relative_error(kind))) <= 1
    assert got["losses"] != exact()["losses"], "16 bits have to be on"
    assert got["skipped"] == []


@pytest.mark.parametrize("flag", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("layout", ["auto", {"stage": 1}, {"stage": 3}], ids=str)
@pytest.mark.usefixtures("one_rank")
def test_flags(device: str, accelerator: str, layout: Any, flag: str) -> None:
    """Alone they are Lightning's; under our strategies they mean the plugin."""
    if device == "cpu" and flag == "16-mixed":
        pytest.skip("Lightning turns 16-mixed into bf16-mixed on a CPU")
    kind = {"bf16-mixed": "bf16", "16-mixed": "fp16"}[flag]
    got = train(layout, None, flag=flag, updates=UPDATES, accelerator=accelerator)
    assert got["plugin"].startswith("MasterWeightPrecision") == (layout != "auto")
    assert max(compare(got, exact(), error=relative_error(kind))) <= 1
    assert got["losses"] != exact()["losses"], "16 bits have to be on"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.usefixtures("one_rank")
def test_parts_in_float32(accelerator: str, kind: str) -> None:
    settings: dict[str, Any] = {
        "keep_fp32": ("model.blocks.*.attn_norm", "model.norm", "model.loss"),
        "accumulate": 2,
        "updates": UPDATES,
        "accelerator": accelerator,
    }
    for layout in ("auto", {"stage": 2}):
        got = train(layout, kind, **settings)
        assert max(compare(got, exact(), error=relative_error(kind, parts=2))) <= 1


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "make",
    [functools.partial(SGD, lr=0.1, fused=True), functools.partial(AdamW, lr=1e-2, fused=True)],
    ids=["SGD", "AdamW"],
)
def test_fused_optimizers(device: str, accelerator: str, kind: Any, make: Any) -> None:
    """Against a loop by hand on the same device. SGD shows by its size whether gradients were unscaled once.

    Both compute the same; a kernel that adds up in another order moves a sum by a rounding: 8 of them leave less than
    a sixteenth of an update. AdamW's first steps are all about the learning rate, whatever the gradient.
    """
    data, look, plugin = batches(5), Look(), MasterWeightPrecision(kind)
    trainer(accelerator=accelerator, plugins=plugin, callbacks=look).fit(Net(make, batches=data))
    _, weights = by_hand(data, kind, make=make, scale=plugin.loss_scale, device=device)
    for mine, theirs, before in zip(look.weights, weights, [None, *weights], strict=False):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.device.type == device
            step = (b - before[i]).abs().max() if before is not None else b.abs().max()
            assert (a - b).abs().max() <= step / 16


def test_scale_follows_the_table(accelerator: str) -> None:
    """Batches 2, 6 and 7 overflow; interval 3 from 8: written by hand. What was skipped has touched nothing."""
    scaler, look = DynamicLossScaler(initial_scale=8, growth_interval=3), Look()
    run = trainer(accelerator=accelerator, plugins=MasterWeightPrecision("fp16", scaler=scaler), callbacks=look)
    module = Net(functools.partial(AdamW, lr=1e-2, fused=True), batches=batches(12, overflow=(2, 6, 7)))
    run.fit(module)
    assert look.scales == [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4, 4]
    assert [i for i, skipped in enumerate(look.skipped) if skipped] == [2, 6, 7]
    for i in (2, 6, 7):
        assert all(torch.equal(a, b) for a, b in zip(look.weights[i - 1], look.weights[i], strict=True))
    assert {float(s["step"]) for s in run.optimizers[0].state.values()} == {9.0}


def test_overflows_of_bf16_are_counted_without_a_guard(accelerator: str) -> None:
    plugin = MasterWeightPrecision("bf16")
    module = Net(lambda p: SGD(p, lr=0.0), batches=batches(4, overflow=(1,)))
    run = trainer(accelerator=accelerator, plugins=plugin, log_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"Update 1: the gradient of net\.0\.weight is not finite"):
        run.fit(module)
    # 0 times NaN: the weights are lost, which is for a guard to prevent; every update after it counts too.
    assert plugin.overflows == 3


class Wide(Net):
    """Two matrices, and what there is on the device between two updates."""

    def __init__(self, width: int) -> None:
        super().__init__(lambda p: AdamW(p, lr=1e-3), batches=batches(3))
        self.net = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"]).float().square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.alive = alive(self.device.type)


def alive(device: str) -> int:
    """Bytes in tensors."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    tensors = [x for x in found if x.layout is torch.strided]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Master 4, gradient 4, moments 8, copy 2; Lightning's autocast keeps no copy between passes.
BYTES: dict[str, tuple[dict[str, Any], int]] = {
    "float32": ({"precision": "32-true"}, 4 + 4 + 8),
    "bf16 of Lightning": ({"precision": "bf16-mixed"}, 4 + 4 + 8),
    "bf16": ({"plugins": "bf16"}, 4 + 4 + 8 + 2),
    "fp16": ({"plugins": "fp16"}, 4 + 4 + 8 + 2),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter(device: str, accelerator: str, name: str) -> None:
    settings, wanted = BYTES[name]

    def fit(width: int) -> float:
        given = {k: MasterWeightPrecision(v) if k == "plugins" else v for k, v in settings.items()}
        before = alive(device)
        module = Wide(width)
        trainer(accelerator=accelerator, **given).fit(module)
        return (module.alive - before) / sum(p.numel() for p in module.parameters())

    fit(512)  # cuBLAS keeps a workspace for every thread that has used it
    # A copy of 2 bytes is 12%; among 67 million parameters everything else has to be less than a third of that.
    assert fit(8192 if device == "cuda" else 256) == pytest.approx(wanted, rel=0.04)
