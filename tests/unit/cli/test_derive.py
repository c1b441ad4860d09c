from __future__ import annotations

from pathlib import Path

import pytest

from lit_pretrain.cli import derive
from lit_pretrain.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "accelerator", "gpus", "expected"),
    [
        (1, "cpu", 0, 1),
        (8, "gpu", 8, 8),
        ("4", "cpu", 0, 4),
        ("auto", "cpu", 8, 1),
        ("auto", "auto", 8, 8),
        ("auto", "auto", 0, 1),
        (-1, "gpu", 2, 2),
        ("-1", "cuda", 2, 2),
        ([0, 2, 3], "gpu", 4, 3),
        ("0,2", "gpu", 4, 2),
        ("1,", "gpu", 4, 1),
    ],
)
def test_num_devices(devices: object, accelerator: str, gpus: int, expected: int) -> None:
    assert derive.num_devices(devices, accelerator, gpus) == expected


@pytest.mark.parametrize("devices", [0, -2, 1.5, "two", [], True, None])
def test_impossible_devices(devices: object) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.devices="):
        derive.num_devices(devices, "cpu", 0)


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, 3), ("0,1", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("GPU-8a,GPU-9b", 2)]
)
def test_visible_gpus(tmp_path: Path, listed: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert derive.visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == expected
    assert derive.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == 0


@pytest.mark.parametrize(("batch", "micro", "ranks", "expected"), [(32, 8, 1, 4), (32, 8, 4, 1), (512, 16, 8, 4)])
def test_accumulation(batch: int, micro: int, ranks: int, expected: int) -> None:
    assert derive.accumulation(batch, micro, ranks) == expected


def test_accumulation_names_the_next_sizes() -> None:
    with pytest.raises(ConfigError, match=r"batch\.global_batch_size=30 must be a multiple.*=8 x .*=2; use 16 or 32,"):
        derive.accumulation(30, 8, 2)
    with pytest.raises(ConfigError, match="use 16, or"):
        derive.accumulation(6, 8, 2)
    with pytest.raises(ConfigError, match=r"batch\.micro_batch_size=0 must be a whole number"):
        derive.accumulation(6, 0, 1)


@pytest.mark.parametrize(
    ("steps", "tokens", "epochs", "expected"),
    [
        (10, None, None, 10),
        (None, 1000, None, 10),
        (None, 1001, None, 11),  # at least the tokens asked for
        (None, 1, None, 1),
        (None, 1e12, None, 10**10),  # as YAML reads 1e12
        (None, None, 3, -1),
        (10, 950, None, 10),  # both, and they agree
    ],
)
def test_max_steps(steps: object, tokens: object, epochs: object, expected: int) -> None:
    assert derive.max_steps(steps, tokens, epochs, 100) == expected


@pytest.mark.parametrize(
    ("steps", "tokens", "epochs", "sentence"),
    [
        (None, None, None, "^no length of training is given; set one of"),
        (10, 2000, None, r"length\.steps=10 and length\.tokens=2000 disagree: 2000 tokens are 20 steps of 100 tokens"),
        (10, None, 2, r"length\.epochs=2 and length\.steps=10 are both given"),
        (None, 7, 2, r"length\.epochs=2 and length\.tokens=7 are both given"),
        ("long", None, None, r"length\.steps='long' must be a whole number"),
        (0, None, None, r"length\.steps=0 must be a whole number of at least 1"),
        (None, 1.5, None, r"length\.tokens=1\.5 must be a whole number"),
        (None, None, 0, r"length\.epochs=0 must be"),
        (True, None, None, r"length\.steps=True must be"),
    ],
)
def test_lengths_that_say_nothing_or_two_things(steps: object, tokens: object, epochs: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        derive.max_steps(steps, tokens, epochs, 100)


def test_intervals_are_counted_in_microbatches() -> None:
    assert derive.every_microbatches("validation.every_steps", 250, 4) == 1000
    with pytest.raises(ConfigError, match=r"validation\.every_steps=0 must be a whole number of at least 1"):
        derive.every_microbatches("validation.every_steps", 0, 4)


def test_max_epochs() -> None:
    assert (derive.max_epochs(None), derive.max_epochs(2)) == (-1, 2)


@pytest.mark.parametrize(
    ("accelerator", "gpus", "expected"),
    [("cpu", 4, "cpu"), ("auto", 0, "cpu"), ("auto", 1, "cuda:0"), ("gpu", 1, "cuda:0"), ("mps", 0, "mps")],
)
def test_single_device(accelerator: str, gpus: int, expected: str) -> None:
    assert derive.single_device(accelerator, gpus) == expected
