"""The check around every test."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from tests.support.leaks import no_leaks


def test_clean_code_passes(tmp_path):
    with no_leaks(tmp_path):
        pass


def test_environment_variables_are_named_and_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.setenv("REMOVED", "old")
    monkeypatch.delenv("ADDED", raising=False)

    def leak() -> None:
        os.environ.update(ADDED="1", KEPT="new")
        del os.environ["REMOVED"]

    with pytest.raises(AssertionError, match=r"ADDED='1'.*KEPT='new'.*REMOVED=None"), no_leaks(tmp_path):
        leak()
    assert os.environ["KEPT"] == os.environ["REMOVED"] == "old"
    assert "ADDED" not in os.environ


def test_what_lightning_sets_is_put_back_in_silence(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with no_leaks(tmp_path):
        os.environ["PL_GLOBAL_SEED"] = "1"
        torch.use_deterministic_algorithms(True, warn_only=True)
    assert "PL_GLOBAL_SEED" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_process_group_is_named_and_destroyed(tmp_path):
    with pytest.raises(AssertionError, match="process group"), no_leaks(tmp_path):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_the_default_dtype_is_named_and_put_back(tmp_path):
    with pytest.raises(AssertionError, match=r"default dtype torch\.float64"), no_leaks(tmp_path):
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32


def test_folders_and_working_directory(tmp_path):
    before = Path.cwd()

    def leak() -> None:
        (tmp_path / "lightning_logs").mkdir()
        os.chdir(tmp_path)

    with pytest.raises(AssertionError, match=r"working directory.*lightning_logs"), no_leaks(tmp_path):
        leak()
    assert Path.cwd() == before


def test_disabled_loggers_are_named_and_enabled(tmp_path):
    logger = logging.getLogger("lit_pretrain.tests.leaks")
    with pytest.raises(AssertionError, match=r"disabled loggers lit_pretrain\.tests\.leaks"), no_leaks(tmp_path):
        logger.disabled = True
    assert not logger.disabled


def test_random_states_are_put_back(tmp_path):
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with no_leaks(tmp_path):
        first = draw()
    assert draw() == first
