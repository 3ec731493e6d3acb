"""The header of an .npy file, which is read before memory is taken for the array.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class Head:
    """What an .npy file declares about its array.

    Attributes:
        shape: the shape of the array.
        by_columns: whether its values are in Fortran order.
        dtype: its dtype.
        start: the offset of its first value in the file, in bytes.
    """

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def declared_bytes(self) -> int:
        """The size of the array's values; 0 if they are Python objects, which are never read."""
        return 0 if self.dtype.hasobject else math.prod(self.shape) * self.dtype.itemsize


def read_head(file: IO[bytes]) -> Head:
    """Returns the header of an .npy file that is at its start, and leaves it at the first value.

    Raises:
        ValueError: the header is missing or damaged.
        OSError: the file cannot be read.
    """
    if file.read(2) == b"PK":
        raise ValueError("it is an .npz file")
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        shape, by_columns, dtype = _HEADERS[version](file)
    except OSError:
        raise
    except Exception as error:
        # NumPy evaluates the header as a Python literal, which has many ways to fail.
        raise ValueError(f"its header is damaged ({' '.join(str(error).split())[:200]})") from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"its shape is {shape}")
    return Head(shape, by_columns, dtype, file.tell())


def array_of(data: bytes) -> np.ndarray:
    """Returns the array that the bytes of an .npy file hold.

    Raises:
        ValueError: the bytes are damaged, hold Python objects, or are fewer than declared.
    """
    file = io.BytesIO(data)
    head = read_head(file)
    if head.start + head.declared_bytes > len(data):
        has = len(data) - head.start
        raise ValueError(f"it declares {head.declared_bytes:,} bytes of values, but has {has:,}")
    file.seek(0)
    array: np.ndarray = np.load(file, allow_pickle=False)
    return array
