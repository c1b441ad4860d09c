"""Bytes per parameter of every mode, measured, against the closed form."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

from lit_pretrain.plugins import MasterWeightPrecision
from tests.support.precisions import Net, batches, trainer

WIDTH = 256


def alive() -> int:
    """Bytes of the storages of all tensors, each once."""
    gc.collect()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}.values())


def tensors() -> Iterator[torch.Tensor]:
    """Tensors with memory behind them; other tests leave sparse ones behind, and the fakes of a compilation."""
    for x in gc.get_objects():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
            continue
        if x.device.type == "cpu" and not torch._is_functional_tensor(x) and not is_functorch_wrapped_tensor(x):
            yield x


def bytes_per_parameter(settings: dict[str, Any], make: Any) -> float:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(make, batches=batches(3))
            self.net = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["x"]).float().square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            self.alive = alive()

    before = alive()
    module = Wide()
    trainer(**settings).fit(module)
    return (module.alive - before) / sum(p.numel() for p in module.parameters())


# Master 4, gradient 4, moments 8 (SGD none), copy 2; Lightning's autocast keeps no copy between passes.
CASES: dict[str, tuple[dict[str, Any], Any, int]] = {
    "fp32": ({"precision": "32-true"}, AdamW, 4 + 4 + 8),
    "fp32 plugin": ({"plugins": "fp32"}, AdamW, 4 + 4 + 8),
    "bf16 of Lightning": ({"precision": "bf16-mixed"}, AdamW, 4 + 4 + 8),
    "pure bf16": ({"precision": "bf16-true"}, AdamW, 2 + 2 + 4),
    "bf16": ({"plugins": "bf16"}, AdamW, 4 + 4 + 8 + 2),
    "fp16": ({"plugins": "fp16"}, AdamW, 4 + 4 + 8 + 2),
    "fp16 with SGD": ({"plugins": "fp16"}, SGD, 4 + 4 + 2),
}


def test_fakes_of_another_test_are_not_counted() -> None:
    before = alive()
    with FakeTensorMode():
        fake = torch.ones(1000)
    sparse = torch.eye(3).to_sparse()
    functional = torch._to_functional_tensor(torch.ones(0))
    assert alive() - before < 1000
    del fake, sparse, functional


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_parameter(name: str) -> None:
    settings, make, wanted = CASES[name]
    if "plugins" in settings:
        settings = {"plugins": MasterWeightPrecision(settings["plugins"])}
    # Batches, step counters and the like: less than 1% beside 68,000 parameters.
    assert bytes_per_parameter(settings, lambda p: make(p, lr=1e-3)) == pytest.approx(wanted, rel=0.01)
