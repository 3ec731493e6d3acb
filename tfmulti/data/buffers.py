"""Arrays whose memory TensorFlow takes without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfmulti.data.source import leaves_of, map_nest

# TensorFlow uses memory of this alignment as it is, and copies any other.
ALIGNMENT = 64


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an uninitialized array that TensorFlow takes without a copy.

    For text (`dtype` is `str`) it is an array of objects.
    """
    if dtype == "str":
        return np.empty(shape, object)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return aligned(size).view(dtype).reshape(shape)


def empty_rows(specs: Any, count: int) -> Any:
    """Returns a nest of uninitialized arrays for `count` examples of the form `specs`."""
    return map_nest(lambda leaf: empty((count, *leaf.shape), leaf.dtype), specs)


def aligned(size: int) -> np.ndarray:
    """Returns `size` uninitialized bytes that TensorFlow takes without a copy.

    TensorFlow copies an array at an address that is not a multiple of `ALIGNMENT`.
    """
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def bytes_of(data: Any) -> int:
    """Returns the number of bytes of all arrays of a nest."""
    return sum(leaf.nbytes for leaf in leaves_of(data))
