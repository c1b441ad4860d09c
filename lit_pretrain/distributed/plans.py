"""Finding out how a module can be split: from whoever knows, with names as the module itself has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelPlan, TensorStyle

_HUGGING_FACE_STYLES: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
}
_HUGGING_FACE_LIMITS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """How a module can be split, names relative to it.

    Args:
        module: Any.
        given: The user's own plan: it wins. Else the plan of the outermost submodule that has a ``parallel_plan``;
            else that of a Hugging Face model inside; else one that shards each repeated layer as a unit and knows no
            tensor parallelism.

    Raises:
        ConfigError: A ``parallel_plan`` is none, or Hugging Face's names a style that is not known here.
    """
    if given is not None:
        return given
    for name, submodule in module.named_modules():
        plan = getattr(submodule, "parallel_plan", None)
        if plan is None:
            continue
        if not isinstance(plan, ParallelPlan):
            raise ConfigError(f"{type(submodule).__name__}.parallel_plan must be a ParallelPlan, not {plan!r}.")
        return within(plan, name)
    for name, submodule in module.named_modules():
        if hasattr(submodule, "config") and hasattr(submodule, "base_model_prefix"):
            return within(_hugging_face_plan(submodule), name)
    return ParallelPlan(units=tuple(_repeated_layers(module)))


def within(plan: ParallelPlan, prefix: str) -> ParallelPlan:
    """A submodule's plan with names as its parent has them."""
    if not prefix:
        return plan

    def under(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for name in names)

    return dataclasses.replace(
        plan,
        tensor_parallel={f"{prefix}.{name}": style for name, style in plan.tensor_parallel.items()},
        sharded_dropout=under(plan.sharded_dropout),
        attention=under(plan.attention),
        units=under(plan.units),
        embed=under(plan.embed),
        blocks=None if plan.blocks is None else f"{prefix}.{plan.blocks}",
        head=under(plan.head),
    )


def _hugging_face_plan(model: Any) -> ParallelPlan:
    words: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    unknown = sorted({word for word in words.values() if word not in _HUGGING_FACE_STYLES})
    if unknown:
        raise ConfigError(
            f"{type(model).__name__} asks for the tensor-parallel style {unknown[0]!r}, which is not known here; give "
            f"the strategy a plan of your own (lit_pretrain.specs.ParallelPlan)."
        )
    styles = {name: _HUGGING_FACE_STYLES[word] for name, word in words.items()}
    modules = dict(model.named_modules())
    styles = {name: style for name, style in styles.items() if "*" in name or name in modules}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if styles and head is not None and embedding is not None and head.weight is embedding.weight:
        names = {id(module): name for name, module in modules.items()}
        if names[id(head)] in styles:  # tied: both by rows of the vocabulary, or they would no longer be one
            styles[names[id(embedding)]] = "vocabulary"
    limits = {f"{type(model).__name__}.config.{key}": getattr(model.config, key, None) for key in _HUGGING_FACE_LIMITS}
    whole = set(getattr(model, "_no_split_modules", None) or ())
    units = tuple(name for name, module in modules.items() if type(module).__name__ in whole)
    return ParallelPlan(
        tensor_parallel=styles,
        divisible={name: value for name, value in limits.items() if isinstance(value, int)},
        units=units or tuple(_repeated_layers(model)),
        **_pipeline_parts(model, modules),
    )


def _pipeline_parts(model: Any, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Embedding, blocks and head where the model's configuration lists its parts in the order in which they run."""
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix in modules else ""
    order = [prefix + name for name in getattr(model.config, "base_model_pp_plan", None) or {}]
    at = next((i for i, name in enumerate(order) if isinstance(modules.get(name), nn.ModuleList)), None)
    if at is None:
        return {}
    output = model.get_output_embeddings()
    heads = [name for name, module in modules.items() if module is output and output is not None]
    return {"embed": tuple(order[:at]), "blocks": order[at], "head": (*order[at + 1 :], *heads[:1])}


def _repeated_layers(module: nn.Module) -> list[str]:
    """Patterns of the outermost containers of several layers of one class."""
    patterns: list[str] = []
    for name, container in module.named_modules():
        if not name or not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        layers = list(container.children())
        alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
        has_weights = all(any(True for _ in layer.parameters()) for layer in layers)
        inside = any(name.startswith(pattern[:-1]) for pattern in patterns)
        if alike and has_weights and not inside:
            patterns.append(f"{name}.*")
    return patterns
