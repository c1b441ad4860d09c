"""Lightning's own constructors, read right."""

from __future__ import annotations

import lightning.pytorch as pl  # noqa: F401  # sets environment variables at its import: not within a test
import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import build, validate


@pytest.mark.parametrize(
    "node",
    [
        # Keeps its **kwargs for DistributedDataParallel, although its bases take none.
        {"_target_": "lightning.pytorch.strategies.DDPStrategy", "gradient_as_bucket_view": True},
        # Fills root_dir, which its base requires.
        {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": "x"},
        {"_target_": "lightning.pytorch.Trainer", "devices": [0, 1], "precision": "bf16-mixed", "max_time": None},
    ],
)
def test_good_nodes(node: dict[str, object]) -> None:
    validate(node, "x")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_step": 1}, "trainer.max_step is not a setting.*did you mean 'max_steps'"),
        ({"max_steps": "many"}, "trainer.max_steps='many' must be a whole number"),
        ({"precision": "bf61"}, "trainer.precision='bf61' must be one of"),
        ({"accelerator": "abacus"}, "^trainer: You selected an invalid accelerator name"),
        ({"fast_dev_run": -1}, "^trainer: fast_dev_run=-1"),
        ({"accelerator": "cpu", "devices": 0}, "^trainer: "),
    ],
)
def test_what_the_trainer_refuses_is_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as e:
        build({"_target_": "lightning.pytorch.Trainer", "logger": False, **settings}, "trainer")
    assert "\n" not in str(e.value)
