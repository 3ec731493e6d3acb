"""Arrays as a source: in memory, or mapped from a file that may be larger than the memory."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmulti.data.source import Arrays, Leaf, Source, leaves_of, map_nest
from tfmulti.errors import DataError


class ArraySource(Source):
    """Rows of arrays that all have the same length.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`. Each is an array or a nest (tuple, list or
            dict) of arrays. The rows of a memory-mapped array are read when they are needed.
        dtypes: a nest of the dtypes in which rows are returned. None: those of the arrays.
        floats: the dtype to which all floating-point arrays are converted, as Keras converts them
            to its `floatx`. None: float64 becomes float32, and other dtypes stay.

    Raises:
        DataError: there are no rows, the arrays differ in length, or a value is not a dense array.
    """

    def __init__(self, data: Any, dtypes: Any = None, floats: str | None = None) -> None:
        self.data = map_nest(functools.partial(_as_array, floats=floats), data)
        lengths = {name: len(array) for name, array in _named(self.data)}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise DataError(
                f"the arrays differ in length: {shown} rows. Each example needs its row in all."
            )
        self._rows = next(iter(lengths.values()))
        if not self._rows:
            raise DataError("the data has no rows. Give at least one example.")
        self._is_mapped = any(isinstance(leaf, np.memmap) for leaf in leaves_of(data))
        self._specs = map_nest(functools.partial(_leaf, floats=floats), self.data)
        if dtypes is not None:
            self._specs = map_nest(lambda leaf, dtype: Leaf(leaf.shape, dtype), self._specs, dtypes)

    def __len__(self) -> int:
        return self._rows

    @property
    def specs(self) -> Any:
        return self._specs

    def read(self, indices: Any, epoch: int = 0) -> Any:
        """Returns the rows at `indices`, a vector of whole numbers; `epoch` changes nothing."""

        def take(array: np.ndarray, leaf: Leaf) -> np.ndarray:
            rows: np.ndarray = np.take(array, indices, axis=0)
            return rows if leaf.dtype == "str" else rows.astype(leaf.dtype, copy=False)

        return map_nest(take, self.data, self._specs)

    def arrays(self) -> Arrays | None:
        # A subclass may change the rows, and mapped rows are not in memory.
        if type(self).read_into is not ArraySource.read_into or self._is_mapped:
            return None
        return Arrays(self.data, self._specs, lambda indices: indices)

    def digest(self) -> int:
        # The first, the middle and the last row stand for all rows, which are not read.
        checksum = super().digest()
        for leaf in leaves_of(self.data):
            rows = leaf[[0, len(leaf) // 2, -1]]
            checksum = zlib.crc32(str(rows.tolist()).encode(), checksum)
        return checksum

    def labels(self) -> np.ndarray | None:
        y = self.data[1] if isinstance(self.data, tuple) and len(self.data) > 1 else None
        return y if isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "biu" else None

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        def take(array: np.ndarray, rows: np.ndarray) -> None:
            if array.dtype == rows.dtype and rows.dtype != object:
                # The indices are in range. With mode="raise" NumPy would copy the rows twice.
                np.take(array, indices, axis=0, out=rows, mode="clip")
            else:
                rows[...] = array[indices]

        map_nest(take, self.data, out)


def _leaf(array: np.ndarray, floats: str | None) -> Leaf:
    """Returns the form of one row of an array, as the source returns it."""
    if array.dtype.kind in "OSU":
        return Leaf(array.shape[1:], "str")
    return Leaf(array.shape[1:], _as_floats(array[:0], floats).dtype.name)


def _as_floats(array: np.ndarray, floats: str | None) -> np.ndarray:
    """Returns a floating-point array in its final dtype, and any other array as it is."""
    if floats is not None and array.dtype.kind == "f":
        return array.astype(floats, copy=False)
    return array.astype(np.float32) if array.dtype == np.float64 and floats is None else array


def _as_array(value: Any, floats: str | None) -> np.ndarray:
    """Returns a value as an array; raises DataError if it is not a dense array with rows.

    A memory-mapped array keeps its dtype, because a conversion would read the whole file. `read`
    converts its rows.
    """
    array = np.asarray(value) if not type(value).__name__.startswith(("Ragged", "Sparse")) else None
    if array is None or (array.ndim == 0 and array.dtype == object):
        raise DataError(
            f"a {type(value).__name__} cannot be read by rows here. Give a tf.data.Dataset of "
            "batches, or a dense array."
        )
    if array.ndim == 0:
        raise DataError(
            f"{array.item()!r} is a single value. Give arrays with one row for each example: "
            "np.array(x)."
        )
    return array if isinstance(value, np.memmap) else _as_floats(array, floats)


def _named(data: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of a nest with their names for messages, such as `x['age']`."""
    if isinstance(data, Mapping):
        return [pair for key, value in data.items() for pair in _named(value, f"{name}[{key!r}]")]
    if isinstance(data, tuple):
        names = ("x", "y", "sample_weight") if not name and len(data) <= 3 else None
        return [
            pair
            for i, value in enumerate(data)
            for pair in _named(value, names[i] if names else f"{name}[{i}]")
        ]
    return [(name or "x", data)]
