"""Arrays in memory as a source: the simplest random access."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfmulti.errors import DataError


class ArraySource:
    """Rows of arrays that all have the same length.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`; each an array or a nest (tuple, list or
            dict) of arrays. float64 becomes float32, Keras' default.

    Raises:
        DataError: there are no rows, or the lengths differ.
    """

    def __init__(self, data: Any) -> None:
        self.data = map_arrays(_as_array, data)
        lengths = {name: len(array) for name, array in _named(self.data)}
        if len(set(lengths.values())) != 1:
            words = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise DataError(
                f"the arrays differ in length: {words} rows. Each example needs its row in all."
            )
        self._rows = next(iter(lengths.values()))
        if not self._rows:
            raise DataError("the data has no rows. Give at least one example.")

    def __len__(self) -> int:
        return self._rows

    def read(self, indices: Any) -> Any:
        """Returns the rows at `indices`, a vector of whole numbers, in that order."""
        return map_arrays(lambda array: array[indices], self.data)


def map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns the same nest of tuples, lists and dicts with `function` applied to each leaf."""
    if isinstance(data, Mapping):
        return {key: map_arrays(function, value) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return tuple(map_arrays(function, value) for value in data)
    return function(data)


def _as_array(value: Any) -> np.ndarray:
    array = np.asarray(value) if not type(value).__name__.startswith(("Ragged", "Sparse")) else None
    if array is None or (array.ndim == 0 and array.dtype == object):
        raise DataError(
            f"a {type(value).__name__} cannot be read by rows here. Give a tf.data.Dataset of "
            "batches, or a dense array."
        )
    if array.ndim == 0:
        raise DataError(
            f"{array.item()!r} is a single value. Give arrays, a row an example: np.array(x)."
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _named(data: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
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
