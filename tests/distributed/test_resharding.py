"""A checkpoint of any layout goes on in any other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_pretrain.distributed import state
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support.parity import BOUND, Slices, Wide, adamw, config
from tests.support.plain import trainer

LAYOUTS = {
    "one": None,
    "zero3": {"stage": 3},
    "zero0": {"stage": 0},
    "tp": {"tensor_parallel_size": 2, "stage": 1},
    "tp_zero3": {"tensor_parallel_size": 2, "stage": 3, "sequence_parallel": False},
}


def go(layout, folder, *, epochs, load=None):
    """Train to the end of an epoch of two updates; save there."""
    # In one process Lightning loads weights before it makes them float64, and would round them.
    module = Wide(config("llama", tied=True), optimizer=adamw, seed=5).double()
    settings = LAYOUTS[layout]
    strategy = "auto" if settings is None else HybridParallelStrategy(**settings)
    run = trainer(strategy, devices=1 if settings is None else 2, max_epochs=epochs)
    run.fit(module, datamodule=Slices(updates=2, rows=4, accumulate=1), ckpt_path=load and str(Path(folder, load)))
    if load is None:
        run.save_checkpoint(Path(folder, f"{layout}.ckpt"))
    return run.global_step, module.exact, {name: state.whole(p) for name, p in module.named_parameters()}


def save_all(folder, layouts):
    for layout in layouts:
        go(layout, folder, epochs=1)


def resume_all(folder, layouts, saved):
    return {(a, b): go(b, folder, epochs=2, load=f"{a}.ckpt") for a in saved for b in layouts}


def check(ranks, tmp_path, several):
    steps, losses, want = go("one", tmp_path, epochs=2)
    assert steps == 4
    go("one", tmp_path, epochs=1)
    ranks(2, save_all, str(tmp_path), several)
    results = ranks(2, resume_all, str(tmp_path), several, ["one", *several])[1]
    results |= resume_all(str(tmp_path), ["one"], several)
    assert len(results) == (len(several) + 1) ** 2 - 1
    for pair, (steps, exact, got) in results.items():
        assert steps == 4, pair
        assert max(abs(a - b) for a, b in zip(exact, losses[2:], strict=True)) <= 1e-12 * max(losses), pair
        for name, value in want.items():
            assert float((got[name] - value).abs().max()) <= BOUND, (pair, name)


def test_layouts_continue_each_other(ranks, tmp_path):
    check(ranks, tmp_path, ["zero3", "tp_zero3"])


@pytest.mark.slow
def test_every_layout_continues_every_other(ranks, tmp_path):
    check(ranks, tmp_path, ["zero3", "zero0", "tp", "tp_zero3"])


def test_a_saved_file_is_whole_and_plain(ranks, tmp_path):
    ranks(2, save_all, str(tmp_path), ["tp_zero3"])
    saved = torch.load(tmp_path / "tp_zero3.ckpt", weights_only=True)
    module = Wide(config("llama", tied=True), optimizer=adamw)
    assert all(type(v) is torch.Tensor for v in saved["state_dict"].values())
    module.double().load_state_dict(saved["state_dict"], strict=True)
    moments = saved["optimizer_states"][0]["state"]
    assert len(moments) == len(list(module.parameters()))
