"""Reads the classes of examples without the rest of the examples."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tfmulti.config.reading import NEXT_STEP
from tfmulti.data.loader import RECORD_FAULTS, cores, is_of_storage, reason_of
from tfmulti.data.source import Source
from tfmulti.errors import DataError

# A thread reads this many examples before the time is checked.
_AT_ONCE = 32


class Labels(NamedTuple):
    """The classes of the first examples of an order.

    Attributes:
        found: the classes, int64, without those of examples that could not be read.
        examples: how many examples were read, with those that could not be read.
    """

    found: np.ndarray
    examples: int


def read_labels(
    source: Source,
    order: Callable[[int, int], np.ndarray] = np.arange,
    *,
    skip_bad: bool = False,
    limit_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Labels | None:
    """Returns the classes of a source, or None if they cannot be read without the rest.

    If the source knows all of its labels, they come in the order of the examples, at once.

    Args:
        source: the examples.
        order: returns the indices of the examples at the positions [start, stop).
        skip_bad: whether examples that cannot be read are left out.
        limit_s: after about this time no more examples are begun. At least one block is read.
        clock: returns seconds.

    Raises:
        DataError: an example cannot be read; the message says which, and why.
    """
    known = source.labels()
    if known is not None:
        return Labels(known.astype(np.int64).reshape(-1), len(source))
    if source.read_labels(np.arange(0)) is None:
        return None
    ends_s, threads, examples = clock() + limit_s, cores(), 0
    found: list[np.ndarray] = []
    read = functools.partial(_read, source, skip_bad)
    with ThreadPoolExecutor(threads, "tfmulti-labels") as pool:
        while examples < len(source) and (not found or clock() < ends_s):
            stop = min(examples + threads * _AT_ONCE, len(source))
            own = order(examples, stop)
            blocks = [own[start : start + _AT_ONCE] for start in range(0, len(own), _AT_ONCE)]
            found.extend(pool.map(read, blocks))
            examples = stop
    return Labels(np.concatenate(found), examples)


def _read(source: Source, skip_bad: bool, examples: np.ndarray) -> np.ndarray:
    """Returns the classes of some examples, which are read one by one if one of them is bad."""
    try:
        return _labels(source, examples)
    except RECORD_FAULTS:
        return np.concatenate([_read_one(source, skip_bad, int(i)) for i in examples])


def _read_one(source: Source, skip_bad: bool, example: int) -> np.ndarray:
    """Returns the class of an example; if it is left out, an empty array."""
    try:
        return _labels(source, np.array([example]))
    except RECORD_FAULTS as error:
        if not skip_bad or is_of_storage(error):
            words = f"{source.where(example)}: {reason_of(error)}"
            raise DataError(f"{words} {NEXT_STEP}") from error
        return np.empty(0, np.int64)


def _labels(source: Source, examples: np.ndarray) -> np.ndarray:
    """Returns the classes of some examples, int64."""
    labels = source.read_labels(examples)
    assert labels is not None
    return labels.astype(np.int64)
