"""Tests on one CUDA device; each is skipped where there is none.

``LIT_PRETRAIN_GPU_TESTS_ON_CPU=1`` runs their bodies on the CPU: it shows that the tests run, and nothing about a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ON_CPU = "LIT_PRETRAIN_GPU_TESTS_ON_CPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    """``cuda``; ``cpu`` where the variable says so."""
    if os.environ.get(ON_CPU) == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    return "cuda"


@pytest.fixture
def accelerator(device: str) -> str:
    """What a Trainer calls the device."""
    return "gpu" if device == "cuda" else "cpu"


@pytest.fixture
def one_rank(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank of a process group, as torchrun would start it; no port is taken."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")  # the store below is in its place
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tests")
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
