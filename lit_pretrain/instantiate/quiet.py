"""Messages of Lightning's that tell a user of the command line nothing."""

from __future__ import annotations

import logging
import warnings

ADVICE = ("litlogger", "litmodels", "litdata", "`weights_only` was not set")
"""Tips to install other products of Lightning's makers, one per Trainer; a default of its own saving."""


def quiet() -> None:
    """Drop those messages in this process: for processes that we start, not for somebody's program."""
    # Lightning 2.6 uses a name that torch 2.13 deprecates (Lightning-AI/pytorch-lightning issue 21326).
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*deprecated", category=FutureWarning)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not any(word in record.getMessage() for word in ADVICE)
    )
