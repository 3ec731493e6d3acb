"""Orders of n examples that are computed index by index: no list of them is held.

A Feistel network over two digits in base ⌈√n⌉ permutes slightly more than n numbers; those
that it puts outside are sent through it again until they fall inside (Black and Rogaway,
Ciphers with arbitrary finite domains, 2002). Up to 65,536 examples the order is held, since so
few digits mix badly: there it is a sort by random keys, each order as likely as any other.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tfmulti.data.hashing import key_of, mixed

HELD = 1 << 16  # 512 KB
_ROUNDS = 6


class Permutation:
    """A random order of `size` examples that depends on `key` alone.

    >>> sorted(Permutation(5, key=7).at(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key = size, key
        self._base = math.isqrt(max(size - 1, 0)) + 1
        self._keys = [np.uint64(key_of(key, i)) for i in range(_ROUNDS)]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the examples at the given positions of the order, int64."""
        if self._size <= HELD:
            return np.take(_held(self._size, self._key), positions)
        found = self._once(np.asarray(positions, np.uint64))
        outside = np.flatnonzero(found >= self._size)
        while len(outside):
            found[outside] = self._once(found[outside])
            outside = outside[found[outside] >= self._size]
        return found.astype(np.int64)

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        base = np.uint64(self._base)
        left, right = numbers // base, numbers % base
        for key in self._keys:
            drawn = ((mixed(right + key) >> np.uint64(32)) * base) >> np.uint64(32)
            total = left + drawn
            left, right = right, np.where(total >= base, total - base, total)
        return left * base + right


@functools.lru_cache(maxsize=4)  # training and validation, this epoch and the next
def _held(size: int, key: int) -> np.ndarray:
    drawn = mixed(np.arange(size, dtype=np.uint64) + np.uint64(key))
    return np.argsort(drawn, kind="stable")
