"""State saved and restored, in another process: what goes on is what never stopped, to the last bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW

from lit_pretrain.callbacks import ExactResume, RunCheckpoint, sort_callbacks
from lit_pretrain.plugins import DynamicLossScaler, FolderCheckpointIO, MasterWeightPrecision
from tests.support.precisions import Look, Net, batches, trainer

UPDATES, SAVED = 14, 7
OVERFLOW = (1, 5, 9)  # with an interval of 3 the scale moves before and after the save


def train(kind: str, folder: str | None, *, stop: int, resume: str | None, io: str) -> dict[str, Any]:
    scaler = DynamicLossScaler(initial_scale=64, growth_interval=3) if kind == "fp16" else None
    plugin, look = MasterWeightPrecision(kind, scaler=scaler), Look()  # type: ignore[arg-type]
    plugins: list[Any] = [plugin]
    callbacks: list[Any] = [look]
    if io == "folder":
        plugins.append(FolderCheckpointIO())
        callbacks.append(ExactResume())
    if folder is not None:
        if io == "folder":
            callbacks.append(RunCheckpoint(folder, every_n_steps=SAVED))
        else:
            callbacks.append(ModelCheckpoint(folder, filename="one", every_n_train_steps=SAVED))
    data = batches(UPDATES, overflow=OVERFLOW if kind == "fp16" else ())
    if resume is not None and io == "file":
        data = data[SAVED:]  # Lightning alone would read the first batches again
    module = Net(functools.partial(AdamW, lr=1e-2), batches=data)
    run = trainer(
        plugins=plugins,
        callbacks=sort_callbacks(callbacks),
        max_steps=stop,
        max_epochs=-1,
        enable_checkpointing=folder is not None,
    )
    run.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    return {
        "weights": [p.detach() for p in module.parameters()],
        "scales": look.scales,
        "losses": module.losses,
        "state": plugin.state_dict(),
    }


@pytest.mark.parametrize("io", ["file", "folder"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_new_process_goes_on_exactly(kind: str, io: str, ranks: Any, tmp_path: Path) -> None:
    whole = train(kind, None, stop=UPDATES, resume=None, io=io)
    first = train(kind, str(tmp_path), stop=SAVED, resume=None, io=io)
    found = [p for p in tmp_path.iterdir() if io == "file" or p.is_dir()]
    assert len(found) == 1
    (second,) = ranks(1, resumed, kind, str(found[0]), io)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert first["scales"] + second["scales"] == whole["scales"]
    assert second["state"] == whole["state"]
    for a, b in zip(second["weights"], whole["weights"], strict=True):
        assert torch.equal(a, b)
    if kind == "fp16":
        assert whole["state"]["scaler"]["skipped_updates"] == 3
        for part in (whole["scales"][:SAVED], whole["scales"][SAVED:]):
            assert len(set(part)) > 1, "the case must move the scale"


def resumed(kind: str, path: str, io: str) -> dict[str, Any]:
    return train(kind, None, stop=UPDATES, resume=path, io=io)


def test_a_checkpoint_holds_the_masters_and_any_precision_loads_it(tmp_path: Path) -> None:
    first = train("fp16", str(tmp_path), stop=SAVED, resume=None, io="file")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    for saved, held in zip(checkpoint["state_dict"].values(), first["weights"], strict=True):
        assert saved.dtype == torch.float32
        assert torch.equal(saved, held)
    assert checkpoint["MasterWeightPrecision"]["scaler"] == first["state"]["scaler"]
    module = Net(functools.partial(AdamW, lr=1e-2), batches=batches(UPDATES))
    trainer(precision="32-true", max_steps=UPDATES, max_epochs=-1).fit(module, ckpt_path=str(tmp_path / "one.ckpt"))
    other = train("bf16", None, stop=UPDATES, resume=str(tmp_path / "one.ckpt"), io="file")
    assert other["state"] == {"overflows": {"total": 0, "in_a_row": 0}}
