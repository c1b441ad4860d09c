"""The private Lightning names that the data needs, in one place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_pretrain.errors import ConfigError


def batches_read(trainer: pl.Trainer) -> int:
    """Microbatches that training has processed since its very first, resumed runs included.

    Lightning restores this counter from a checkpoint. `processed` is right in every hook where a checkpoint can be
    written; `completed` lags by one in `on_train_batch_end`. No public name offers the total: Lightning 2.6.
    """
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # declared as a base class without `processed`
    return int(total.processed)


def rescale_restored_batches(trainer: pl.Trainer, *, old: int, new: int) -> None:
    """Count a checkpoint's batches in microbatches of another size, before the loops read them.

    Lightning counts microbatches. When the ranks or the microbatch size have changed, the same updates are another
    number of them. A checkpoint's loops are reachable for a data module only through the connector: Lightning 2.6.

    Args:
        trainer: Within its call of ``load_state_dict``.
        old: Microbatches per update when the checkpoint was written.
        new: Microbatches per update now.

    Raises:
        ConfigError: When the checkpoint was written in the middle of an update.
    """
    loops = trainer._checkpoint_connector._loaded_checkpoint.get("loops")
    if loops is None:  # weights only
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for tracker in (progress["total"], progress["current"]):
        updates, rest = divmod(tracker["processed"], old)
        if rest:
            raise ConfigError(
                f"The checkpoint was written in the middle of an update ({rest} of {old} microbatches), so the number "
                "of ranks and data.micro_batch_size cannot change; resume with the old ones or from another checkpoint."
            )
        shift = updates * new - tracker["processed"]
        for key in tracker:
            tracker[key] += shift
