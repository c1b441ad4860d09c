"""The containers written without torch.save are those that torch.save writes."""

from __future__ import annotations

import io

import pytest
import torch

from lit_pretrain.distributed.checkpoint._compat import without_crc
from lit_pretrain.distributed.checkpoint.blob import Containers, raw

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 300)])
def test_head_bytes_and_tail_are_what_torch_saves(dtype, shape):
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    around = Containers().around(dtype, shape)
    assert around is not None
    written = around[0] + bytes(raw(tensor)) + around[1]
    saved = io.BytesIO()
    with without_crc():
        torch.save(tensor, saved)
    assert written == saved.getvalue()
    assert len(around[0]) % 64 == 0
    assert torch.equal(torch.load(io.BytesIO(written), weights_only=True), tensor)


def test_an_empty_tensor_is_left_to_torch():
    assert Containers().around(torch.float32, (0, 4)) is None


def test_a_torch_whose_archives_depend_on_values_is_left_to_itself(monkeypatch):
    """As torch.save's do when its own checksums are on."""
    monkeypatch.setattr("lit_pretrain.distributed.checkpoint.blob.without_crc", lambda: io.BytesIO())
    assert Containers().around(torch.float32, (3,)) is None


def test_our_setting_stays_ours():
    with without_crc():
        assert not torch.serialization.get_crc32_options()
    assert torch.serialization.get_crc32_options()
