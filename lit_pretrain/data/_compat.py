"""The private Lightning names that the data needs, in one place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def batches_read(trainer: pl.Trainer) -> int:
    """Microbatches that training has processed since its very first, resumed runs included.

    Lightning restores this counter from a checkpoint. `processed` is right in every hook where a checkpoint can be
    written; `completed` lags by one in `on_train_batch_end`. No public name offers the total: Lightning 2.6.
    """
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # declared as a base class without `processed`
    return int(total.processed)
