"""Bytes per parameter of every mode, measured, against the closed form."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from lit_pretrain.plugins import MasterWeightPrecision
from tests.support.precisions import Net, batches, trainer

WIDTH = 256


def alive() -> int:
    """Bytes of the storages of all tensors, each once."""
    gc.collect()
    # A sparse tensor that another test left behind has no storage of its own.
    found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    tensors = [x for x in found if x.layout is torch.strided]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_parameter(name: str) -> None:
    settings, make, wanted = CASES[name]
    if "plugins" in settings:
        settings = {"plugins": MasterWeightPrecision(settings["plugins"])}
    # Batches, step counters and the like: less than 1% beside 68,000 parameters.
    assert bytes_per_parameter(settings, lambda p: make(p, lr=1e-3)) == pytest.approx(wanted, rel=0.01)
