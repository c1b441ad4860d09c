"""What is done inside blocks, recomputation and compilation, changes nothing under any strategy, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.parity import Wide, check

PP = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LONG = {"layers": 4, "rows": 24}
LLAMA = {"style": "llama", "tied": False}


class Full(Wide):
    """Backward computes whole blocks again."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, activation_checkpointing="full")


class Selective(Wide):
    """Backward computes again what is cheap."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, activation_checkpointing="selective")


class Compiled(Wide):
    """Each block is compiled in place, as ``compile=True`` does it."""

    def setup(self, stage: str) -> None:
        torch.compiler.reset()
        super().setup(stage)
        for block in self.model.blocks.values():
            # Traces forward and backward as the default one does, and needs no C++ compiler.
            block.compile(backend="aot_eager")
        counters.clear()

    def on_train_end(self) -> None:
        super().on_train_end()
        assert counters["stats"]["unique_graphs"] > 0  # a layout may put something in the place of what was compiled


def test_recomputation_on_two_ranks(ranks):
    check(
        ranks,
        2,
        [
            ({"stage": 3}, {"kind": Full, "accumulate": 3}),
            ({"tensor_parallel_size": 2, "sequence_parallel": True}, {**LLAMA, "kind": Selective}),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Full, Selective])
def test_recomputation_under_every_strategy(ranks, kind):
    two = [
        *({"stage": stage} for stage in range(4)),
        *({"tensor_parallel_size": 2, "sequence_parallel": split} for split in (True, False)),
        *({"context_parallel_size": 2, "stage": stage} for stage in (1, 3)),
    ]
    schedules = ("1f1b", "looped_bfs") if kind is Selective else ("1f1b", "zero_bubble", "zbv", "dualpipev")
    pipelines = [{**PP, "schedule": name} for name in schedules]
    check(
        ranks,
        2,
        [(strategy, {"kind": kind, **LLAMA}) for strategy in two]
        + [(strategy, {"kind": kind, **LONG}) for strategy in pipelines],
    )
    check(ranks, 4, [({**PP, "tensor_parallel_size": 2}, {"kind": kind, **LONG, **LLAMA})])


@pytest.mark.slow
def test_compiled_blocks_under_every_strategy(ranks):
    """Schedules that compute input and weight gradients apart are refused: see test_pp."""
    two = [
        *({"stage": stage} for stage in range(4)),
        *({"tensor_parallel_size": 2, "sequence_parallel": split} for split in (True, False)),
        {"context_parallel_size": 2},
    ]
    pipelines = [{**PP, "schedule": name} for name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")]
    check(
        ranks,
        2,
        [(strategy, {"kind": Compiled}) for strategy in two]
        + [(strategy, {"kind": Compiled, **LONG}) for strategy in pipelines],
    )
