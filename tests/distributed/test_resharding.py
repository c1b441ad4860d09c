"""A checkpoint of any layout goes on in any other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lit_pretrain.callbacks import ExactResume
from lit_pretrain.distributed import state
from lit_pretrain.distributed.checkpoint import read_checkpoint
from lit_pretrain.plugins import FolderCheckpointIO
from lit_pretrain.strategies import HybridParallelStrategy
from tests.support.parity import BOUND, Slices, Wide, adamw, config
from tests.support.plain import trainer

PP = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS = {
    "one": (1, None),
    "zero3": (2, {"stage": 3}),
    "zero0": (2, {"stage": 0}),
    "tp": (2, {"tensor_parallel_size": 2, "stage": 1}),
    "tp4": (4, {"tensor_parallel_size": 4}),
    "tp_zero3": (2, {"tensor_parallel_size": 2, "stage": 3, "sequence_parallel": False}),
    "pp": (2, PP),
    "cp": (2, {"context_parallel_size": 2}),
    "pp_tp": (4, {**PP, "tensor_parallel_size": 2}),
    "hybrid": (4, {"stage": 3, "replicate_size": 2}),
    "zero3_tp": (4, {"tensor_parallel_size": 2, "stage": 3}),  # rows of the vocabulary are cut twice
}


def go(layout, folder, *, epochs, load=None, save=None, folders=True):
    """Train to the end of an epoch of two updates; save there, unless it was loaded and has no name to be saved by."""
    # In one process Lightning loads weights before it makes them float64, and would round them.
    module = Wide(config("llama", tied=True), optimizer=adamw, seed=5).double()
    devices, settings = LAYOUTS[layout]
    strategy = "auto" if settings is None else HybridParallelStrategy(**settings)
    plugins = [FolderCheckpointIO()] if folders else []
    callbacks = [ExactResume()] if folders else []
    run = trainer(strategy, devices=devices, max_epochs=epochs, plugins=plugins, callbacks=callbacks)
    # A folder stands where a path without an ending says.
    run.fit(module, datamodule=Slices(updates=2, rows=4, accumulate=1), ckpt_path=load and str(Path(folder, load)))
    if load is None or save is not None:
        run.save_checkpoint(Path(folder, save or (layout if folders else f"{layout}.ckpt")))
    run.strategy.checkpoint_io.teardown()
    return run.global_step, module.exact, {name: state.whole(p) for name, p in module.named_parameters()}


def save_all(folder, layouts, folders=True):
    for layout in layouts:
        go(layout, folder, epochs=1, folders=folders)


def resume_all(folder, layouts, saved, folders=True):
    ending = "" if folders else ".ckpt"
    return {(a, b): go(b, folder, epochs=2, load=a + ending, folders=folders) for a in saved for b in layouts}


def by_ranks(layouts):
    return {n: [x for x in layouts if LAYOUTS[x][0] == n] for n in sorted({LAYOUTS[x][0] for x in layouts})}


def check(ranks, tmp_path, several, *, folders=True):
    steps, losses, want = go("one", tmp_path, epochs=2, folders=folders)
    assert steps == 4
    go("one", tmp_path, epochs=1, folders=folders)
    every = ["one", *several]
    for world, layouts in by_ranks(several).items():
        ranks(world, save_all, str(tmp_path), layouts, folders, timeout_s=300)
    results = [resume_all(str(tmp_path), ["one"], several, folders)]
    for world, layouts in by_ranks(several).items():
        results += ranks(world, resume_all, str(tmp_path), layouts, every, folders, timeout_s=300)
    names = {}
    for rank in results:
        for pair, (steps, exact, got) in rank.items():
            assert steps == 4, pair
            assert max(abs(a - b) for a, b in zip(exact, losses[2:], strict=True)) <= 1e-12 * max(losses), pair
            for name, value in got.items():
                assert float((want[name] - value).abs().max()) <= BOUND, (pair, name)
            names.setdefault(pair, set()).update(got)
    assert len(names) == len(every) ** 2 - 1
    assert all(found == set(want) for found in names.values())


def test_layouts_continue_each_other(ranks, tmp_path):
    check(ranks, tmp_path, ["tp_zero3", "pp"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "several",
    [["zero3", "zero0", "tp", "pp", "cp", "pp_tp"], ["hybrid", "zero3_tp"]],
    ids=["six others", "cut twice"],
)
def test_every_layout_continues_every_other(ranks, tmp_path, several):
    check(ranks, tmp_path, several)


def link(folder, layout, number):
    """One epoch of a run that changes its layout at the end of each."""
    return go(layout, folder, epochs=number + 1, load=str(number - 1) if number else None, save=str(number))


@pytest.mark.slow
def test_a_run_that_changes_its_layout_again_and_again_loses_nothing(ranks, tmp_path):
    """No number of ranks divides the vocabulary, so each layout pads it otherwise; the last one takes over from all."""
    chain = ["tp", "tp4", "zero3_tp", "one"]
    _, losses, want = go("one", tmp_path / "whole", epochs=len(chain))
    for number, layout in enumerate(chain[:-1]):
        results = ranks(LAYOUTS[layout][0], link, str(tmp_path), layout, number)
        for _, exact, _ in results:
            part = losses[2 * number : 2 * number + 2]
            assert max(abs(a - b) for a, b in zip(exact, part, strict=True)) <= 1e-12 * max(losses), layout
    steps, exact, got = link(str(tmp_path), "one", len(chain) - 1)
    assert steps == 2 * len(chain)
    assert max(abs(a - b) for a, b in zip(exact, losses[-2:], strict=True)) <= 1e-12 * max(losses)
    assert got.keys() == want.keys()
    assert all(float((got[name] - value).abs().max()) <= BOUND for name, value in want.items())


@pytest.mark.slow
def test_every_layout_continues_every_other_from_single_files(ranks, tmp_path):
    check(ranks, tmp_path, ["zero3", "tp_zero3", "pp", "cp"], folders=False)


def save_and_count(folder):
    """What this rank writes itself: bytes of its tensors' files."""
    go("zero3", folder, epochs=1)
    dist.barrier()
    files = Path(folder, "zero3", "tensors").glob(f"__{dist.get_rank()}_*")
    return sum(path.stat().st_size for path in files)


def test_every_rank_writes_its_own_part(ranks, tmp_path):
    sizes = ranks(2, save_and_count, str(tmp_path))
    _, tensors = read_checkpoint(tmp_path / "zero3")
    assert min(sizes) > 0.4 * sum(sizes)  # all in equal parts, but for the optimizer's counters, which rank 0 writes
    module = Wide(config("llama", tied=True), optimizer=adamw).double()
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    module.load_state_dict(weights, strict=True)


def test_a_saved_file_is_whole_and_plain(ranks, tmp_path):
    ranks(2, save_all, str(tmp_path), ["tp_zero3"], False)
    saved = torch.load(tmp_path / "tp_zero3.ckpt", weights_only=True)
    module = Wide(config("llama", tied=True), optimizer=adamw)
    assert all(type(v) is torch.Tensor for v in saved["state_dict"].values())
    module.double().load_state_dict(saved["state_dict"], strict=True)
    moments = saved["optimizer_states"][0]["state"]
    assert len(moments) == len(list(module.parameters()))
