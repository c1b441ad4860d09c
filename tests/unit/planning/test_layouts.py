"""Legal layouts against tables worked out by hand."""

from __future__ import annotations

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.layouts import (
    check_batch,
    check_pipeline,
    check_sequence,
    check_tensor_parallel,
    legal_sizes,
    tensor_parallel_limits,
)
from lit_pretrain.specs import GPTConfig, ParallelDims


def config(**changes):
    return GPTConfig(**{"vocab_size": 61, "block_size": 16, "n_layer": 4, "n_head": 12, "n_embd": 48} | changes)


@pytest.mark.parametrize(
    ("changes", "world_size", "legal"),
    [
        ({}, None, [1, 2, 3, 4, 6, 12]),  # 12 heads, 192 hidden features
        ({}, 8, [1, 2, 4]),
        ({"n_kv_head": 4}, None, [1, 2, 4]),
        ({"n_kv_head": 1}, None, [1]),
        ({"ffn_hidden_size": 100}, None, [1, 2, 4]),  # 100 = 4 x 25
        ({"mlp": "swiglu", "ffn_hidden_size": 9}, None, [1, 3]),
    ],
)
def test_tensor_parallel_sizes(changes, world_size, legal):
    limits = tensor_parallel_limits(config(**changes))
    assert legal_sizes(limits, world_size=world_size) == legal
    for size in range(1, 13):
        if all(value % size == 0 for value in limits.values()):
            check_tensor_parallel(size, limits)
        else:
            with pytest.raises(ConfigError):
                check_tensor_parallel(size, limits)


def test_a_refused_size_names_the_first_broken_rule_and_the_way_out():
    with pytest.raises(ConfigError) as e:
        check_tensor_parallel(3, {"model.n_head": 8, "model.n_kv_head": 4})
    assert str(e.value) == "strategy.tensor_parallel_size=3 must divide model.n_head=8; use 1, 2 or 4."
    with pytest.raises(ConfigError) as e:
        check_tensor_parallel(8, {"model.n_head": 8, "model.n_kv_head": 4}, world_size=2)
    assert str(e.value) == "strategy.tensor_parallel_size=8 must divide model.n_kv_head=4; use 1 or 2."


@pytest.mark.parametrize(
    ("size", "layers", "per_rank", "fits"),
    [(4, 4, 1, True), (5, 4, 1, False), (2, 4, 2, True), (3, 5, 2, False), (3, 8, 1, True), (1, 1, 2, True)],
)
def test_pipeline_stages_have_a_layer_each(size, layers, per_rank, fits):
    if fits:
        check_pipeline(size, num_layers=layers, stages_per_rank=per_rank)
        return
    with pytest.raises(ConfigError, match=rf"pipeline_parallel_size={size}.* model.n_layer={layers}; use 1"):
        check_pipeline(size, num_layers=layers, stages_per_rank=per_rank)


@pytest.mark.parametrize(("length", "cp", "fits"), [(16, 2, True), (16, 8, True), (12, 4, False), (7, 1, True)])
def test_context_parallel_chunks_come_in_pairs(length, cp, fits):
    if fits:
        check_sequence(length, ParallelDims(cp=cp))
        return
    with pytest.raises(ConfigError, match=r"multiple of 8; use 1, 2, 3 or 6, or another length"):
        check_sequence(length, ParallelDims(cp=cp))


def test_batches():
    check_batch(ParallelDims(dp_shard=2, dp_replicate=2), global_batch_size=24, micro_batch_size=3)
    with pytest.raises(ConfigError, match=r"batch.global_batch_size=20 .*4 data-parallel ranks; use a multiple of 12"):
        check_batch(ParallelDims(dp_shard=4), global_batch_size=20, micro_batch_size=3)
    check_batch(ParallelDims(tp=4), global_batch_size=3, micro_batch_size=3)  # tensor-parallel ranks read the same rows
    pipeline = ParallelDims(pp=4)
    check_batch(pipeline, global_batch_size=8, micro_batch_size=8, num_microbatches=8)
    with pytest.raises(ConfigError, match=r"num_microbatches=2 must be at least .*pipeline_parallel_size=4"):
        check_batch(pipeline, global_batch_size=8, micro_batch_size=8, num_microbatches=2)
    with pytest.raises(
        ConfigError, match=r"num_microbatches=5 must divide batch.micro_batch_size=8; use 4 or 8, or a "
    ):
        check_batch(pipeline, global_batch_size=8, micro_batch_size=8, num_microbatches=5)
