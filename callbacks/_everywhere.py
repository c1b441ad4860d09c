"""Work that may fail on one rank, and then has to fail on all of them with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Trainer

from lit_pretrain.errors import ConfigError, DataError

T = TypeVar("T")


def everywhere(trainer: Trainer, work: Callable[[], T]) -> T:
    """Do ``work``; every rank calls it, and none goes on alone.

    Without it the other ranks of one that raised would wait, and fail with their backend's words much later.

    Args:
        trainer: After its process group was initialised.
        work: Raises ``ConfigError`` or ``DataError`` where something of the user's is wrong.

    Returns:
        This rank's result.

    Raises:
        ConfigError, DataError: What the first rank in trouble raised, on all of them.
    """
    result: Any = None
    problem: tuple[bool, str] | None = None
    try:
        result = work()
    except ConfigError as error:
        if trainer.world_size == 1:
            raise
        problem = isinstance(error, DataError), str(error)
    if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, problem)
        problem = next((one for one in everyone if one is not None), None)
    if problem is not None:
        is_data, message = problem
        raise DataError(message) if is_data else ConfigError(message)
    return result  # type: ignore[no-any-return]
