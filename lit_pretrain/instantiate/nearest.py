"""The nearest known name, for messages about a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LISTED = 12
"""Names shown when none is near: more do not fit a terminal's line or two."""


def nearest(name: str, known: Iterable[str]) -> str:
    """How a message about an unknown ``name`` goes on: the nearest known name, or the known ones.

    Example::

        >>> nearest("lrr", ["lr", "betas"])
        "did you mean 'lr'?"
    """
    names = sorted(set(known))
    lower = {n.lower(): n for n in names}
    hits = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    if hits:
        return f"did you mean {lower[hits[0]]!r}?"
    if not names:
        return "nothing is known there."
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}."
