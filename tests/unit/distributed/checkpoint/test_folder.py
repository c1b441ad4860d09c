"""A folder gives back what was written, and nothing that was changed since."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lit_pretrain.distributed.checkpoint import (
    CheckpointFacts,
    read_checkpoint,
    read_rng,
    verify,
    write_checkpoint,
)

FACTS = CheckpointFacts(
    global_step=250, microbatches_read=1000, updates_read=250, reason="best", monitors={"val/loss": 2.5, "x": math.inf}
)


def state():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=g)
    return {
        "model.wte.weight": weight,
        "model.head.weight": weight,  # tied
        "model.half": torch.randn(7, generator=g).to(torch.bfloat16),
        "model.transposed": torch.randn(5, 3, generator=g).T,
        "model.view": torch.randn(100, generator=g)[10:12],
        "model.count": torch.tensor(3),
        "model.empty": torch.empty(0, 4),
        "model.nan": torch.tensor([math.nan, math.inf, -0.0]),
        "optimizer.0.step.wte.weight": torch.tensor(17.0),
    }


def write(folder: Path, **changes):
    given = {"tensors": state(), "tree": {"epoch": 1}, "rng": [], "facts": FACTS, **changes}
    return write_checkpoint(folder, **given)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: nan equals nan, and 0 is not -0."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().numpy(force=True).tobytes() == (b.contiguous().numpy(force=True).tobytes())
        if a.dtype != torch.bfloat16
        else same(a.view(torch.int16), b.view(torch.int16))
    )


def test_everything_comes_back_bit_for_bit(tmp_path):
    tree = {"epoch": 1, "callbacks": {"stop": {"best": torch.tensor(math.nan), "n": (1, 2)}}, 3: [torch.arange(4)]}
    rng = [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}, {"torch": torch.get_rng_state() + 0}]
    written = write(tmp_path / "step-250", tree=tree, rng=rng)
    read, tensors = read_checkpoint(tmp_path / "step-250")
    assert tensors.keys() == state().keys()
    assert all(same(tensors[name], tensor) for name, tensor in state().items())
    assert tensors["model.head.weight"].data_ptr() == tensors["model.wte.weight"].data_ptr()
    assert read["callbacks"]["stop"]["n"] == (1, 2)
    assert math.isnan(read["callbacks"]["stop"]["best"])
    assert torch.equal(read[3][0], torch.arange(4))
    states = read_rng(tmp_path / "step-250")
    assert torch.equal(states[0]["torch"], rng[0]["torch"])
    assert states[0]["python"] == (3, (1, 2), None)
    assert len(states) == 2
    facts = verify(tmp_path / "step-250")
    assert facts == written
    assert (facts.global_step, facts.microbatches_read, facts.updates_read, facts.reason) == (250, 1000, 250, "best")
    assert facts.monitors == {"val/loss": 2.5, "x": math.inf}
    assert facts.versions["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["step-250"]
