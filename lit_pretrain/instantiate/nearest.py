"""The nearest known name, for messages about a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

ALIKE = 0.12
"""Two names whose likenesses (0 to 1) differ by less are both offered."""
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
    hits = get_close_matches(name.lower(), lower, n=2, cutoff=0.5)
    if hits:
        best, *rest = (SequenceMatcher(None, name.lower(), hit).ratio() for hit in hits)
        close = hits if rest and best - rest[0] < ALIKE else hits[:1]
        return f"did you mean {' or '.join(repr(lower[hit]) for hit in close)}?"
    if not names:
        return "nothing is known there."
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}."
