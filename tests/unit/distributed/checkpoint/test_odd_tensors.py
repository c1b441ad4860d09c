"""Tensors and names of every odd kind come back bit for bit, from our reader and from torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lit_pretrain.distributed.checkpoint import CheckpointFacts, read_checkpoint, write_checkpoint


def odd() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=g)
    return {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "empty in the middle": torch.empty(3, 0, 2, dtype=torch.int32),
        "one": torch.ones(1, 1, 1, 1, 1),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.arange(-4, 5, dtype=torch.int8),
        "uint8": torch.arange(7, dtype=torch.uint8),
        "uint16": torch.arange(5).to(torch.uint16),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "half": torch.randn(5, generator=g).half(),
        "bfloat16": torch.randn(3, 3, generator=g).bfloat16(),
        "float8": torch.randn(4, generator=g).to(torch.float8_e4m3fn),
        "double": torch.tensor([torch.nan, torch.inf, -0.0, 5e-324], dtype=torch.float64),
        "complex": torch.randn(4, generator=g, dtype=torch.complex64),
        "conjugate": torch.randn(4, generator=g, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, generator=g, dtype=torch.complex64).conj().imag,
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.randn(1, 4, generator=g).expand(3, 4),
        "slice": base[2],
        "parameter": torch.nn.Parameter(base[3:]),
        "with graph": torch.nn.Parameter(base[:1]) * 2,
        "größe/ΔЖ漢🙂": torch.ones(2),
        "a b.c..d/../e": torch.ones(3),
        " ": torch.ones(4),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return not a.numel() or bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


@pytest.mark.parametrize("file_bytes", [64, 1 << 26])
def test_odd_tensors(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr("lit_pretrain.distributed.checkpoint.tensors.FILE_BYTES", file_bytes)
    given = {f"model.{name}": tensor for name, tensor in odd().items()}
    write_checkpoint(tmp_path / "c", tensors=given, tree={}, facts=CheckpointFacts(global_step=1))
    _, found = read_checkpoint(tmp_path / "c")
    assert found.keys() == given.keys()
    assert [name for name in given if not same(found[name], given[name])] == []
    dcp_to_torch_save(tmp_path / "c" / "tensors", tmp_path / "all.pt")
    stock = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [name for name in given if not same(stock[name], given[name])] == []
