"""The classes of examples, read without the rest of them."""

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

_AT_ONCE = 32  # examples that a thread reads before the time is looked at


class Labels(NamedTuple):
    """The classes of the first `examples` in an order, int64; without those that were lost."""

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
    """Returns the classes of a source, or None where they cannot be read alone.

    Args:
        order: the examples at positions [start, stop).
        skip_bad: examples that cannot be read are left out.
        limit_s: about so long is read; what is begun then is read to its end.

    Raises:
        DataError: an example cannot be read; it says which, and why.
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
    try:
        return _labels(source, examples)
    except RECORD_FAULTS:
        return np.concatenate([_read_one(source, skip_bad, int(i)) for i in examples])


def _read_one(source: Source, skip_bad: bool, example: int) -> np.ndarray:
    try:
        return _labels(source, np.array([example]))
    except RECORD_FAULTS as error:
        if not skip_bad or is_of_storage(error):
            words = f"{source.where(example)}: {reason_of(error)}"
            raise DataError(f"{words} {NEXT_STEP}") from error
        return np.empty(0, np.int64)


def _labels(source: Source, examples: np.ndarray) -> np.ndarray:
    labels = source.read_labels(examples)
    assert labels is not None
    return labels.astype(np.int64)
