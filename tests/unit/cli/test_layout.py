"""Layouts of a configuration, worked out by hand, and what is refused before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.cli import checks
from lit_pretrain.cli.layout import data_parallel_size, parallel_dims
from lit_pretrain.errors import ConfigError
from tests.conf import tiny


def node(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"lit_pretrain.strategies.{name}", **settings}


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        ("auto", 8, 8),
        ("zero3", 8, 8),
        ("tp", 8, 1),
        ({"_target_": "lightning.pytorch.strategies.DDPStrategy"}, 8, 8),
        (node("ZeROStrategy", stage=3, replicate_size=2), 8, 8),
        (node("ZeROStrategy", stage=0, replicate_size=1), 8, 8),
        (node("TensorParallelStrategy", tensor_parallel_size=None), 8, 1),
        (node("TensorParallelStrategy", tensor_parallel_size=2), 8, 4),
        (node("PipelineParallelStrategy", schedule="1f1b"), 8, 1),
        (node("PipelineParallelStrategy", pipeline_parallel_size=4, stage=0), 8, 2),
        (node("ContextParallelStrategy", context_parallel_size=4), 8, 2),
        (node("HybridParallelStrategy", tensor_parallel_size=2, pipeline_parallel_size=2, shard_size=None), 16, 4),
        (node("HybridParallelStrategy", context_parallel_size=2, replicate_size=1, shard_size=None, stage=0), 8, 4),
        (node("presets.HybridParallelStrategy", tensor_parallel_size=8), 8, 1),
    ],
)
def test_ranks_with_data_of_their_own(strategy: Any, ranks: int, expected: int) -> None:
    assert data_parallel_size(strategy, ranks) == expected


def test_others_are_not_known() -> None:
    assert parallel_dims("ddp", 4) is None
    assert parallel_dims({"_target_": "mine.Strategy", "tensor_parallel_size": 3}, 4) is None


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(
        ConfigError, match=r"^strategy\.tensor_parallel_size=3 must divide the 8 ranks .*use 1, 2, 4 or 8"
    ):
        data_parallel_size(node("TensorParallelStrategy", tensor_parallel_size=3), 8)
    both = node("HybridParallelStrategy", tensor_parallel_size=None, shard_size=None)
    with pytest.raises(ConfigError, match=r"^strategy\.shard_size and strategy\.tensor_parallel_size are both null"):
        data_parallel_size(both, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=tp", "trainer.devices=4"], "strategy.tensor_parallel_size=4 must divide model.n_head=2; use 1 or"),
        (["strategy=pp", "trainer.devices=2"], "strategy.pipeline_parallel_size=2 needs 2 layers, but model.n_layer=1"),
        (
            ["strategy=pp", "trainer.devices=2", "model.n_layer=2", "batch.micro_batch_size=4"],
            "A batch of 4 rows cannot be cut into strategy.num_microbatches=8 equal parts; use 2 or 4",
        ),
        (
            ["strategy=cp", "trainer.devices=2", "model.block_size=18", "batch.sequence_length=18"],
            "strategy.context_parallel_size=2 needs batch.sequence_length=18 to be a multiple of 4; use 1, 3 or 9",
        ),
        (["strategy=cp", "trainer.devices=2", "model.dropout=0.1"], "model.dropout=0.1 needs whole rows of attention"),
        (
            [
                "strategy=hybrid", "strategy.pipeline_parallel_size=2", "trainer.devices=4", "model.n_layer=2",
                "strategy.num_microbatches=2",
            ],
            "callbacks.sampler writes text with the whole model, which strategy.pipeline_parallel_size=2 spreads over",
        ),
    ],
)  # fmt: skip
def test_what_the_command_line_refuses(words: list[str], message: str, tmp_path: Path) -> None:
    shards = tiny.write_corpus(tmp_path)
    config = tiny.composed(tmp_path, [*shards, *tiny.SHRINK, "batch.global_batch_size=16", *words])
    with pytest.raises(ConfigError) as e:
        checks.check(config, multirun=False)
    assert str(e.value).startswith(message)


def test_accumulation_follows_the_axes(tmp_path: Path) -> None:
    shards = tiny.write_corpus(tmp_path)
    words = ["strategy=hybrid", "strategy.tensor_parallel_size=2", "trainer.devices=4", "batch.global_batch_size=16"]
    config = tiny.composed(tmp_path, [*shards, *tiny.SHRINK, *words])
    assert config["batch"]["data_parallel_size"] == 2
    assert config["trainer"]["accumulate_grad_batches"] == 4  # 16 sequences of 2 x 2
    checks.check(config, multirun=False)
