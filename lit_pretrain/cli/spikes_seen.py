"""What a run has rolled back, for ``inspect``: the skip ledger as text and as JSON. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_pretrain.errors import DataError
from lit_pretrain.spikes import LedgerFile, Skip

FILE = "spikes.jsonl"
_ROWS = 8  # documents printed per spike; JSON has all that the ledger has
_CHARACTERS = 60


def read(run_dir: Path) -> tuple[list[Skip], str]:
    """The entries of a run, and what is wrong with the file; either may be empty."""
    try:
        return list(LedgerFile(run_dir / FILE).read().entries), ""
    except DataError as error:
        return [], str(error)


def as_text(entries: list[Skip], problem: str) -> str:
    """Each spike with what was done and the documents of its batch; empty where there was none."""
    if not entries and not problem:
        return ""
    lines = ["spikes"] + ([f"  damaged  {problem}"] if problem else [])
    for entry in entries:
        lines.append(f"  update {entry.spike:,}: {_what(entry)}")
        lines.append(f"    {_action(entry)}")
        batches = entry.details.get("batches") or []
        if batches:
            lines.append(f"    batches {', '.join(map(str, batches))}")
        documents = entry.details.get("documents") or []
        lines += [f"    {_document(row)}" for row in documents[:_ROWS]]
        left = int(entry.details.get("rows") or len(documents)) - min(len(documents), _ROWS)
        if left > 0:
            lines.append(f"    and {left} rows more")
    return "\n".join(lines) + "\n"


def as_json(entries: list[Skip]) -> list[dict[str, Any]]:
    """The same, plain."""
    return [
        {
            "update": entry.spike,
            "kind": entry.kind,
            "loss": _plain(entry.loss),
            "grad_norm": _plain(entry.grad_norm),
            "z": _plain(entry.z),
            "reason": entry.reason,
            "back_to": entry.step,
            "left_out": [entry.low, entry.high],
            "lr_factor": entry.lr_factor,
            "lr_until": entry.until,
            "batches": entry.details.get("batches") or [],
            "documents": entry.details.get("documents") or [],
        }
        for entry in entries
    ]


def _what(entry: Skip) -> str:
    figures = [("loss", entry.loss), ("gradient norm", entry.grad_norm), ("z", entry.z)]
    known = ", ".join(f"{name} {value:.4g}" for name, value in figures if value is not None)
    return f"{entry.kind}, {known}" if known else entry.kind


def _action(entry: Skip) -> str:
    cut = "" if entry.lr_factor == 1.0 else f", learning rate x {entry.lr_factor:g} until update {entry.until:,}"
    many = f"{entry.high - entry.low:,} updates' worth of data left out, from position {entry.low:,}"
    return f"back to update {entry.step:,}; {many}{cut}"


def _document(row: dict[str, Any]) -> str:
    text = " ".join(str(row.get("text") or "").split())
    said = f'  "{text[:_CHARACTERS]}"' if text else ""
    return f"{row.get('source')}  {Path(str(row.get('file'))).name} token {row.get('offset')}{said}"


def _plain(value: float | None) -> float | str | None:
    if value is None or abs(value) < float("inf"):
        return value
    return str(value)
