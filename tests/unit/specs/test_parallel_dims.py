from __future__ import annotations

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelDims


def test_the_product_is_the_world():
    dims = ParallelDims(dp_replicate=2, dp_shard=3, pp=5, cp=7, tp=11)
    assert dims.world_size == 2310
    assert dims.data_parallel_size == 6
    assert list(dims.sizes) == ["dp_replicate", "dp_shard", "pp", "cp", "tp"]  # data outermost, tensors innermost


def test_one_size_takes_what_the_others_leave():
    assert ParallelDims.fit(8, dp_shard=None, tp=2) == ParallelDims(dp_shard=4, tp=2)
    assert ParallelDims.fit(8, dp_shard=None, dp_replicate=2, tp=2) == ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert ParallelDims.fit(1, dp_shard=None) == ParallelDims()
    assert ParallelDims.fit(6, tp=2, pp=3) == ParallelDims(tp=2, pp=3)


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (
            4,
            {"dp_shard": None, "tp": 3},
            "strategy.tensor_parallel_size=3 must divide the 4 ranks (trainer.devices x trainer.num_nodes); "
            "use 1, 2 or 4.",
        ),
        (
            4,
            {"tp": 2},
            "strategy.tensor_parallel_size=2 must equal the 4 ranks (trainer.devices x trainer.num_nodes); use 4.",
        ),
        (
            4,
            {"dp_shard": 4, "tp": 2},
            "strategy.shard_size=4 x strategy.tensor_parallel_size=2 is 8 and must equal the 4 ranks "
            "(trainer.devices x trainer.num_nodes); choose sizes whose product is 4.",
        ),
        (
            6,
            {"dp_shard": None, "dp_replicate": 2, "tp": 2},
            "strategy.replicate_size=2 x strategy.tensor_parallel_size=2 is 4 and must divide the 6 ranks "
            "(trainer.devices x trainer.num_nodes); choose sizes whose product is 1, 2, 3 or 6.",
        ),
        (3, {}, "The strategy is laid out for 1 rank, but there are 3 ranks (trainer.devices x trainer.num_nodes); set "
         "trainer.devices=1."),
    ],
)  # fmt: skip
def test_misfits_list_what_is_legal(world, sizes, message):
    with pytest.raises(ConfigError) as e:
        ParallelDims.fit(world, **sizes)
    assert str(e.value) == message


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(ConfigError, match=r"strategy.tensor_parallel_size=.* must be a whole number of at least 1"):
        ParallelDims(tp=size)
