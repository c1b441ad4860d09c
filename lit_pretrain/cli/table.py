"""Plain text with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Rows of a name and a text under a title.

    Args:
        title: Above the rows; empty for none.
        rows: Name and text.
    """

    title: str
    rows: Sequence[tuple[str, str]]


def layout(sections: Sequence[Section]) -> str:
    """Sections one below the other, all texts in one column."""
    width = max((len(name) for section in sections for name, _ in section.rows), default=0)
    blocks = []
    for section in sections:
        lines = [section.title] if section.title else []
        lines += [f"  {name:<{width}}  {text}".rstrip() for name, text in section.rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """A table.

    Args:
        header: Names of the columns.
        rows: Cells.
        left: Columns to align on the left; the others are on the right.
    """
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (f"{c:<{w}}" if i in left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip() + "\n"

    return "".join(line(row) for row in table)
