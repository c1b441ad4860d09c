"""What happens in a run, told to whoever started it."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_only

_LOGGER = logging.getLogger(
    "lightning.pytorch.utilities.rank_zero"
)  # where ``rank_zero_info`` writes, in lightning 2.6


@rank_zero_only
def say(message: str) -> None:
    """One line on rank 0, through Lightning's log, as a warning.

    A Python warning would add a line of our source, and keep silent about the same event the next time.
    """
    _LOGGER.warning(message)
