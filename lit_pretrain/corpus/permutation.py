"""Shuffles of any length that need no memory: a key and an index give the shuffled index."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 6


def derive_keys(*parts: int | str, count: int) -> NDArray[np.uint64]:
    """``count`` independent 64-bit keys from whole numbers and names, the same on every machine, (count,)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts).encode()
    return np.frombuffer(hashlib.shake_128(text).digest(8 * count), "<u8").astype(np.uint64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each 64-bit value of an array scrambled one to one; products wrap around.

    Source: Steele, Lea, Flood 2014, the finaliser of SplitMix64.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class KeyedPermutation:
    """A permutation of ``0 ... size - 1`` that computes any of its values on its own.

    A Feistel network over the next even number of bits, walked until the value falls below ``size``.

    Args:
        size: Length, at least 1.
        keys: From ``derive_keys(..., count=KeyedPermutation.num_keys)``.

    Source: Luby and Rackoff 1988; Black and Rogaway 2002 (cycle walking).
    """

    num_keys = _ROUNDS

    def __init__(self, size: int, *, keys: NDArray[np.uint64]) -> None:
        assert size >= 1
        assert keys.size == _ROUNDS
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = keys

    def __call__(self, index: ArrayLike) -> NDArray[np.int64]:
        """Where ``index`` goes: values below ``size``, same shape as ``index``, int64."""
        values = self._scramble(np.atleast_1d(np.asarray(index)).astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._scramble(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(np.shape(index))

    def _scramble(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, (left ^ mix(right + key)) & self._mask
        return (left << self._half) | right
