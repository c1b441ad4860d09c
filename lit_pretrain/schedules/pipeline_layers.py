"""Which layers each pipeline stage gets; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lit_pretrain.errors import ConfigError


def split_layers(
    n_layer: int,
    stages: int,
    *,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    cut: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Layers of each stage, first to last.

    The rule: every stage gets one layer; each further layer goes to the stage that is then the cheapest, counting the
    embedding on the first and the head on the last. Since layers cost the same, no split has a cheaper dearest stage.
    Among equals the later stage gets the layer: earlier stages hold more microbatches.

    Args:
        n_layer: Layers of the model.
        stages: Stages in all.
        embed_cost: Work of the embedding, in layers.
        head_cost: Work of the head, in layers.
        cut: The user's own counts instead.

    Raises:
        ConfigError: Fewer layers than stages, or a cut that does not fit.
    """
    if cut is not None:
        return _checked(tuple(cut), n_layer=n_layer, stages=stages)
    if n_layer < stages:
        raise ConfigError(
            f"{stages} pipeline stages need at least {stages} layers, but the model has {n_layer}; use at most "
            f"{n_layer} stages (strategy.pipeline_parallel_size x strategy.stages_per_rank), or more layers."
        )
    counts = [1] * stages
    costs = [1.0] * stages
    costs[0] += embed_cost
    costs[-1] += head_cost
    for _ in range(n_layer - stages):
        cheapest = min(range(stages), key=lambda s: (costs[s], -s))
        counts[cheapest] += 1
        costs[cheapest] += 1.0
    return tuple(counts)


def _checked(cut: tuple[int, ...], *, n_layer: int, stages: int) -> tuple[int, ...]:
    whole = all(isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in cut)
    if not whole or len(cut) != stages or sum(cut) != n_layer or 0 in cut[1:-1]:
        example = list(split_layers(n_layer, stages)) if n_layer >= stages else None
        raise ConfigError(
            f"strategy.layers_per_stage={list(cut)} must name {stages} counts (pipeline_parallel_size x "
            f"stages_per_rank) with the sum {n_layer} (the model's layers), of which only the first "
            "and the last may be 0" + (f"; for example {example}." if example else ".")
        )
    return cut


def layer_range(counts: Sequence[int], stage: int) -> range:
    """The layers of one stage."""
    first = sum(counts[:stage])
    return range(first, first + counts[stage])
