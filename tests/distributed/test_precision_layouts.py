"""16-bit training under every layout: near float32, near one process, and one decision on overflow for all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from tests.support.precision_runs import compare, relative_error, train

TWO: dict[str, Any] = {
    "ddp": "ddp",
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2, "num_microbatches": 4},
}
FOUR: dict[str, Any] = {
    "zero3 x tp": {"stage": 3, "tensor_parallel_size": 2},
    "pp x zero2": {"stage": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
}
# Into how many parts the sums over features (tp) and rows (all others; a pipeline's microbatches) are cut.
PARTS = {"pp": 4, "zero3 x tp": 4, "pp x zero2": 4}


# Plain data parallelism over two ranks, however it is stored: halves of a mean of two are exact, so results are equal
# to the bit, and what one of them keeps to over many updates the others do too.
DATA_PARALLEL = ("ddp", "zero0", "zero1", "zero2", "zero3")
LONG = ("zero3", "tp", "pp")


def several(layouts: dict[str, Any], kind: str, updates: int, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    return {name: train(layout, kind, updates=updates, devices=devices, **settings) for name, layout in layouts.items()}


def whole(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Weights of all ranks together: a pipeline's hold different ones."""
    return {n: w for result in results for n, w in result[name]["weights"].items()}


@functools.cache
def alone(kind: str, updates: int) -> dict[str, Any]:
    return train("auto", kind, updates=updates)


def check(results: list[dict[str, Any]], kind: str, updates: int) -> None:
    exact, single = alone("fp32", updates), alone(kind, updates)
    for name in results[0]:
        first = {**results[0][name], "weights": whole(results, name)}
        for other in results[1:]:
            assert other[name]["losses"] == first["losses"], name
            assert other[name]["norms"] == first["norms"], name
            assert other[name]["scales"] == first["scales"], name
        parts = PARTS.get(name, 2)
        error = relative_error(kind, parts=parts)
        to_exact = compare(first, exact, error=error)
        # Two runs, each with its own roundings.
        to_single = compare(first, single, error=math.hypot(error, relative_error(kind)))
        shares = " ".join(f"{x:.3f}" for x in (*to_exact, *to_single))
        print(f"{name} {kind}: of the bounds on losses and weights, to fp32 and to one process: {shares}")
        assert max(to_exact) <= 1, name
        assert max(to_single) <= 1, name


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_two_ranks(ranks: Any, kind: str) -> None:
    results = ranks(2, several, TWO, kind, 6, 2, {})
    check(results, kind, 6)
    ddp = results[0]["ddp"]
    for name in DATA_PARALLEL:
        for kept in ("losses", "scales"):  # a norm adds up shard by shard
            assert results[0][name][kept] == ddp[kept], name
        for parameter, weight in results[0][name]["weights"].items():
            assert torch.equal(weight, ddp["weights"][parameter]), (name, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_two_ranks_for_200_updates(ranks: Any, kind: str) -> None:
    check(ranks(2, several, {name: TWO[name] for name in LONG}, kind, 200, 2, {}, timeout_s=600.0), kind, 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_four_ranks(ranks: Any, kind: str) -> None:
    """Fewer updates: the bound is a formula of their norms and holds from the first one on."""
    check(ranks(4, several, FOUR, kind, 40, 4, {}, timeout_s=600.0), kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_one_process_for_200_updates(kind: str) -> None:
    got, exact = alone(kind, 200), alone("fp32", 200)
    used = compare(got, exact, error=relative_error(kind))
    print(f"{kind}: {used[0]:.3f} of the bound on losses, {used[1]:.3f} of that on weights")
    assert max(used) <= 1
    assert got["losses"] != exact["losses"], "16 bits have to be on"
    assert exact["losses"][-1] < exact["losses"][0] - 0.05, "the case must learn something"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_overflow_on_one_rank_skips_everywhere_once(ranks: Any, world: int) -> None:
    """On the last rank: of a pipeline its last stage, of tensor and data parallelism one shard."""
    layouts = TWO if world == 2 else FOUR
    results = ranks(world, several, layouts, "fp16", 4, world, {"overflow": (1, world - 1)})
    for name in layouts:
        for result in results:
            found = result[name]
            assert found["skipped"] == [1], name
            assert found["scales"] == [2.0**15, 2.0**14, 2.0**14, 2.0**14], name
            assert found["unchanged"] is True, name
            assert found["losses"] == results[0][name]["losses"], name


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_settings_of_the_plugin_under_every_layout(ranks: Any, kind: str) -> None:
    """Parts in float32, reductions in 16 bits, accumulation, clipping: still near the same settings on one process."""
    settings = {
        "keep_fp32": ("model.blocks.*.attn_norm", "model.norm", "model.loss"),
        "reduce_in": "16bit",
        "accumulate": 2,
        "clip": 1.0,
    }
    layouts = {name: TWO[name] for name in ("ddp", "zero1", "zero3", "tp", "pp")}
    updates = 4
    results = ranks(2, with_settings, layouts, kind, updates, settings)
    assert results[0]["wide"]["losses"] != results[0]["ddp"]["losses"], "16 bits have to be sent"
    exact = train("auto", "fp32", updates=updates, accumulate=2, clip=1.0)
    clipped = {**exact, "norms": [min(norm, 1.0) for norm in exact["norms"]]}
    for name in layouts:
        error = relative_error(kind, parts=2 * PARTS.get(name, 2))
        used = compare({**results[0][name], "weights": whole(results, name)}, clipped, error=error)
        print(f"{name} {kind}, all settings: {used[0]:.3f} {used[1]:.3f} of the bounds")
        assert max(used) <= 1, name


def with_settings(layouts: dict[str, Any], kind: str, updates: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Every layout, and one more whose gradients are sent in float32, in the same two processes."""
    wide = train("ddp", kind, updates=updates, devices=2, **(settings | {"reduce_in": "fp32"}))
    return {"wide": wide, **several(layouts, kind, updates, 2, settings)}
