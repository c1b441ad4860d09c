"""One warning of Lightning's, kept back for a while."""

from __future__ import annotations

import contextlib
import warnings


class MutedWarning:
    """Keeps one warning back until :meth:`remove` is called; others, and other programs' filters, stay as they are.

    Args:
        message: A regular expression that the text begins with.
        category: Of the warning.
    """

    def __init__(self, message: str, category: type[Warning]) -> None:
        warnings.filterwarnings("ignore", message=message, category=category)
        self._filter = warnings.filters[0]

    def remove(self) -> None:
        """Let the warning through again; calling it twice changes nothing."""
        with contextlib.suppress(ValueError):  # somebody has put all filters back meanwhile
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
