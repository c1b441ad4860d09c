"""What a budget came to, for people."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_pretrain import units
from lit_pretrain.planning.laws import FITTED_PARAMETERS, FITTED_TOKENS


def count_parameters(module: nn.Module) -> dict[str, int]:
    """``all`` trained parameters, and those ``non_embedding``; a tied weight once, as an embedding."""
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    trained = [p for p in module.parameters() if p.requires_grad]
    return {
        "all": sum(p.numel() for p in trained),
        "non_embedding": sum(p.numel() for p in trained if id(p) not in embeddings),
    }


def name_limits(tokens: dict[str, float], seconds: dict[str, float], *, max_cost: float | None) -> str:
    """All limits in force, each with its figure; the nearest of those in tokens first."""
    said = [f"{units.count(n)} tokens (budget.{name})" for name, n in sorted(tokens.items(), key=lambda kv: kv[1])]
    for name, limit in seconds.items():
        cost = "" if name != "max_cost" else f", {max_cost:g} in money"
        said.append(f"{units.duration(limit)}{cost} (budget.{name})")
    return said[0] if len(said) == 1 else f"the first of {', '.join(said)}"


def describe(summary: dict[str, Any]) -> str:
    """The summary as a table."""
    parameters = ", ".join(f"{units.count(n)} {name.replace('_', '-')}" for name, n in summary["parameters"].items())
    rows = [
        ("ended", summary["reason"]),
        ("parameters N", f"{parameters} ({summary['counted'].replace('_', '-')} count)"),
        ("tokens D", f"{units.count(summary['tokens'])} that count, {units.count(summary['tokens_read'])} read"),
        ("tokens/parameter", f"{summary['tokens_per_parameter']:.2f}"),
        ("compute C", f"{summary['flops']:.3g} FLOPs in {units.duration(summary['hours'] * 3600.0)}"),
    ]
    if summary["cost"] is not None:
        rows.append(("cost", f"{summary['cost']:.2f} for {summary['device_hours']:.2f} device hours"))
    loss, predicted = summary["loss"], summary["predicted"]
    unknown = "not known; name what the module logs with loss=..."
    unit = " nats per token" if predicted else ""
    rows.append((summary["loss_name"] or "loss", unknown if loss is None else f"{loss:.4f}{unit}"))
    for name, value in predicted.items():
        stands = "" if loss is None else f"; this run stands {loss - value:+.4f} to it, on other text"
        rows.append((name, f"{value:.4f} predicted{stands}"))
    if predicted and not _is_fitted(summary):
        rows.append(
            (
                "",
                f"far from the runs that these were fitted to: {' to '.join(map(units.count, FITTED_PARAMETERS))} "
                f"parameters, {' to '.join(map(units.count, FITTED_TOKENS))} tokens",
            )
        )
    return "\n".join(["", "budget", *(f"  {name:<24}{value}" for name, value in rows)])


def _is_fitted(summary: dict[str, Any]) -> bool:
    pairs = (summary["parameters"][summary["counted"]], FITTED_PARAMETERS), (summary["tokens"], FITTED_TOKENS)
    return all(low <= value <= high for value, (low, high) in pairs)
