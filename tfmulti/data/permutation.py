"""Orders of n examples that are computed index by index, so that no list of indices is held.

A Feistel network over two digits in base b = ⌈√n⌉ permutes the b² numbers below b², slightly more
than n. A result of n or more is sent through the network again until it falls below n (Black and
Rogaway, Ciphers with arbitrary finite domains, 2002).

Up to 65,536 examples the order is a sort by random keys instead, and it is held in memory. The
network mixes badly with so few digits, and the sort makes each order as likely as any other.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tfmulti.data.hashing import key_of, mixed

# Orders of up to this many examples are held in memory: 512 KB each.
MAX_STORED = 1 << 16
# With four rounds the chi-square statistic of the orders was 1.02 a degree of freedom.
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
        """Returns the indices of the examples at the given positions of the order, int64."""
        if self._size <= MAX_STORED:
            return np.take(_stored_order(self._size, self._key), positions)
        indices = self._once(np.asarray(positions, np.uint64))
        outside = np.flatnonzero(indices >= self._size)
        while len(outside):
            indices[outside] = self._once(indices[outside])
            outside = outside[indices[outside] >= self._size]
        return indices.astype(np.int64)

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the numbers after one pass through the network, uint64."""
        base = np.uint64(self._base)
        left, right = numbers // base, numbers % base
        for key in self._keys:
            # The upper 32 random bits times the base, shifted by 32, is a number below the base.
            drawn = ((mixed(right + key) >> np.uint64(32)) * base) >> np.uint64(32)
            total = left + drawn
            left, right = right, np.where(total >= base, total - base, total)
        return left * base + right


# Four orders: those of training and validation, each for this epoch and the next.
@functools.lru_cache(maxsize=4)
def _stored_order(size: int, key: int) -> np.ndarray:
    """Returns the whole order of a small number of examples."""
    drawn = mixed(np.arange(size, dtype=np.uint64) + np.uint64(key))
    return np.argsort(drawn, kind="stable")
