"""The random state of one process, as plain containers and tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture() -> State:
    """States of python, numpy and torch (and of the CUDA device in use): ints, floats, texts, lists and tensors.

    Loads with ``torch.load(weights_only=True)``. Takes about 0.1 ms and never waits for a device.
    """
    version, numbers, gauss = random.getstate()
    generator = np.random.get_state(legacy=False)
    state: State = {
        "python": [version, list(numbers), gauss],
        "numpy": {"bit_generator": generator["bit_generator"]} | _plain(generator),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put this process into a captured state. What this machine has not (CUDA) is left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    generator = dict(state["numpy"])
    inner = dict(generator["state"])
    if "key" in inner:
        inner["key"] = np.asarray(inner["key"], np.uint32)
    np.random.set_state(generator | {"state": inner})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def of_rank(states: Sequence[State], *, rank: int) -> State:
    """The state saved by ``rank``; for a rank that did not exist then, one of its own.

    It is derived from the state of a rank that did, so that every resume draws the same numbers, and different ones
    on every rank.
    """
    if rank < len(states):
        return states[rank]
    parent = states[rank % len(states)]
    # 32 bytes of the parent's state and the rank: SeedSequence mixes them well.
    words = [rank, *parent["torch"][:64].view(torch.int32).tolist(), *parent["torch"][-16:].tolist()]
    seeds = np.random.SeedSequence([word % 2**32 for word in words]).generate_state(3).tolist()
    python = random.Random(seeds[0]).getstate()
    numpy = np.random.RandomState(seeds[1]).get_state(legacy=False)
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": _plain(numpy),
        "torch": torch.Generator().manual_seed(seeds[2]).get_state(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
