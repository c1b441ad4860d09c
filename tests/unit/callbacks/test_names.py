"""Names that torch.compile puts into a module: not in a checkpoint, and no hindrance when one is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_pretrain.callbacks import ExactResume, RunCheckpoint
from lit_pretrain.callbacks._resuming.names import accept_wrappers
from lit_pretrain.distributed.checkpoint import read_checkpoint
from lit_pretrain.plugins import FolderCheckpointIO
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Inner(Tiny):
    """Somebody else's module, whose network may be compiled; `eager` compiles nothing, but wraps all the same."""

    def __init__(self, *, compiled):
        super().__init__(lr=0.05, optimizer=lambda ps: torch.optim.Adam(ps, lr=0.05))
        self.net.register_buffer("seen", torch.zeros(()))
        if compiled:
            self.net = torch.compile(self.net, backend="eager")


def fit(tmp_path, *, compiled, steps, path=None, ours=True):
    torch.manual_seed(3)
    callbacks = [RunCheckpoint(every_n_steps=4), *([ExactResume()] if ours else [])]
    run = trainer(tmp_path, *callbacks, enable_checkpointing=True, max_steps=steps, plugins=[FolderCheckpointIO()])
    module = Inner(compiled=compiled)
    run.fit(module, loader(), ckpt_path=path)
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_a_run_goes_on_under_other_wrappers(tmp_path, before, after):
    whole = fit(tmp_path / "whole", compiled=False, steps=8)
    fit(tmp_path / "parts", compiled=before, steps=4)
    folder = tmp_path / "parts" / "checkpoints" / "step-00000004"
    _, tensors = read_checkpoint(folder)
    assert {"model.net.0.weight", "model.net.seen", "optimizer.0.exp_avg.net.0.weight"} <= tensors.keys()
    assert not [name for name in tensors if "_orig_mod" in name]
    parts = fit(tmp_path / "parts", compiled=after, steps=8, path=folder)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_without_our_callbacks_the_same_module_goes_on(tmp_path):
    """The plugin alone does not meet the module: it gives back the names that the module had."""
    saved = fit(tmp_path, compiled=True, steps=4, ours=False)
    folder = tmp_path / "checkpoints" / "step-00000004"
    loaded = fit(tmp_path, compiled=True, steps=4, path=folder, ours=False)  # nothing is left to do
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    _, tensors = read_checkpoint(folder)
    assert not [name for name in tensors if "_orig_mod" in name]


def test_names_that_only_a_wrapper_tells_apart_are_left_alone():
    module = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1), "weight": nn.Identity()})
    module.register_parameter("bias", nn.Parameter(torch.zeros(1)))  # besides _orig_mod.bias
    handle = accept_wrappers(module)
    state = {name: torch.full_like(value, i) for i, (name, value) in enumerate(module.state_dict().items(), 1)}
    module.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    handle.remove()


def test_other_weights_are_refused_as_before():
    module = nn.Linear(1, 1)
    accept_wrappers(module)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1), "other": torch.ones(1)})
    module.load_state_dict({"_orig_mod.weight": torch.full((1, 1), 3.0), "bias": torch.ones(1)})
    assert module.weight.item() == 3.0
