"""Random numbers as functions of what they belong to: (seed, epoch, example), not of a history.

Whole-number arithmetic alone, so that they are the same on every machine and under every
version of NumPy, whose generators may change their streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mixed(values: Any) -> np.ndarray:
    """Returns 64 random-looking bits for each 64-bit number, uint64 of the same shape.

    The finalizer of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, 2014): a bijection of which each bit depends on all bits of its argument.
    """
    z = np.asarray(values, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def key_of(*words: int) -> int:
    """Returns 64 bits that depend on all words and on their order.

    >>> key_of(1, 2) != key_of(2, 1)
    True
    """
    key = 0
    for word in words:
        z = (key + (word & _MASK) + int(_STEP)) & _MASK
        z = ((z ^ (z >> 30)) * int(_FIRST)) & _MASK
        z = ((z ^ (z >> 27)) * int(_SECOND)) & _MASK
        key = z ^ (z >> 31)
    return key


def uniform(key: int, examples: np.ndarray, draws: int) -> np.ndarray:
    """Returns numbers in [0, 1), float64 [examples, draws]: each example has its own.

    Args:
        key: what all of them depend on, such as `key_of(seed, epoch)`.
        examples: whole numbers from 0 on.
    """
    own = mixed(np.asarray(examples, np.uint64) * _STEP + np.uint64(key))
    counters = own[:, np.newaxis] + np.arange(1, draws + 1, dtype=np.uint64) * _STEP
    return (mixed(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
