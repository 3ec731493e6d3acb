"""Random numbers as functions of (seed, epoch, example) instead of a generator's history.

The functions use whole-number arithmetic alone. So the numbers are the same on every machine and
under every version of NumPy, whose own generators may change their streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mixed(values: Any) -> np.ndarray:
    """Returns 64 random-looking bits for each 64-bit number, uint64 of the same shape.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, 2014). It is a bijection, and each bit of its result depends on all bits of its
    argument.
    """
    z = np.asarray(values, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """Returns 64 bits that depend on all numbers and on their order.

    >>> key_of(1, 2) != key_of(2, 1)
    True
    """
    key = 0
    for number in numbers:
        key = int(mixed([(key + number + int(_STEP)) & _MASK])[0])
    return key


def uniform(key: int, examples: np.ndarray, draws: int) -> np.ndarray:
    """Returns numbers in [0, 1) that each example has of its own, float64 [len(examples), draws].

    Args:
        key: the value on which all numbers depend, such as `key_of(seed, epoch)`.
        examples: the indices of the examples, whole numbers from 0.
        draws: how many numbers each example gets.
    """
    states = mixed(np.asarray(examples, np.uint64) * _STEP + np.uint64(key))
    counters = states[:, np.newaxis] + np.arange(1, draws + 1, dtype=np.uint64) * _STEP
    return (mixed(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
