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
from tfmulti.data.bad_records import is_of_storage, read_around_faults, reason_of
from tfmulti.data.loader import cores
from tfmulti.data.source import Source
from tfmulti.errors import DataError

# A thread reads this many examples before the time is checked.
_BLOCK = 32


class Labels(NamedTuple):
    """The classes of the first examples of an order.

    Attributes:
        values: the classes, int64, without those of examples that could not be read.
        examples: how many examples were read, with those that could not be read.
    """

    values: np.ndarray
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
    deadline_s, threads, start = clock() + limit_s, cores(), 0
    labels: list[np.ndarray] = []
    read = functools.partial(_labels_of, source, skip_bad)
    with ThreadPoolExecutor(threads, "tfmulti-labels") as thread_pool:
        while start < len(source) and (not labels or clock() < deadline_s):
            stop = min(start + threads * _BLOCK, len(source))
            examples = order(start, stop)
            blocks = [examples[i : i + _BLOCK] for i in range(0, len(examples), _BLOCK)]
            labels.extend(thread_pool.map(read, blocks))
            start = stop
    return Labels(np.concatenate(labels), start)


def _labels_of(source: Source, skip_bad: bool, examples: np.ndarray) -> np.ndarray:
    """Returns the classes of the examples that can be read; raises DataError for the others."""

    def read(indices: np.ndarray) -> np.ndarray:
        labels = source.read_labels(indices)
        assert labels is not None
        return labels.astype(np.int64)

    def on_fault(example: int, error: Exception) -> None:
        if not skip_bad or is_of_storage(error):
            reason = f"{source.where(example)}: {reason_of(error)}"
            raise DataError(f"{reason} {NEXT_STEP}") from error

    return np.concatenate([np.empty(0, np.int64), *read_around_faults(read, examples, on_fault)])
