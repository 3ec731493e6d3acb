"""The interface of random access data: a number of examples, each read by its index.

    Source                   `len(source)` and `read(indices, epoch)`
    ├── ArraySource, …       one class for each kind of data: arrays, encoded records, images
    ├── OverSource           another source, with a change of each example
    └── SourceSlice          some of the examples of another source, in an order of its own

Sharding, shuffling, splitting, caching and resuming are arithmetic on the indices of the examples.
So they are the same for every source.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class Leaf(NamedTuple):
    """The form of one array of an example: its shape without the row dimension, and its dtype.

    The dtype is NumPy's name of it; text has the dtype `str`.
    """

    shape: tuple[int, ...]
    dtype: str


class Arrays(NamedTuple):
    """Arrays in memory from which the rows of examples can be gathered.

    `data` is a nest of arrays. `specs` is the form of the gathered rows, with their dtypes.
    `rows_of` returns the row of each of the given examples in these arrays.
    """

    data: Any
    specs: Any
    rows_of: Callable[[np.ndarray], np.ndarray]


class Source(ABC):
    """Examples with random access: each worker reads any of them by their indices.

    A subclass implements `__len__`, `specs` and `read`. The other methods have defaults.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples."""

    @property
    @abstractmethod
    def specs(self) -> Any:
        """The form of an example: a nest of `Leaf`, such as `(x, y)`."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """Returns the examples at the given indices, in that order.

        Several threads may call it at once. If it raises one of the exceptions below, the reader
        calls it again for each example alone. Any other exception is a fault of the source's code
        and ends the run.

        Args:
            indices: the indices of the examples, int64 [n].
            epoch: the epoch, which changes what is random (augmentation) and nothing else.

        Returns:
            A nest as in `specs`. Each leaf has n rows and is an array or a TensorFlow tensor.

        Raises:
            OSError, DataError: one of the examples cannot be read.
        """

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        """Writes the examples at the given indices into `out`, a nest of arrays.

        A source that makes examples one by one overrides it to write them in place, which saves a
        copy.

        Args:
            indices: the indices of the examples, int64 [n].
            epoch: the epoch, as in `read`.
            out: a nest as in `specs`, each leaf an array of n rows.

        Raises:
            OSError, DataError: one of the examples cannot be read.
        """
        map_nest(_copy, self.read(indices, epoch), out)

    def where(self, index: int) -> str:
        """Returns where the example `index` is, for messages, such as a file and a record."""
        return f"example {index}"

    def labels(self) -> np.ndarray | None:
        """Returns the class of each example as whole numbers; None if that requires reading."""
        return None

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        """Returns the classes of the examples at `indices`, read without the rest of them.

        It returns None if the source cannot do that. It raises the exceptions of `read`.
        """
        labels = self.labels()
        return None if labels is None else labels[indices]

    def arrays(self) -> Arrays | None:
        """Returns the arrays in memory whose rows are the examples, or None if there are none."""
        return None

    def digest(self) -> int:
        """Returns a checksum of the size, the form and the labels of the data.

        Workers compare it to notice that they have different data. A source does not read all of
        its examples for it.
        """
        labels = self.labels()
        known = b"" if labels is None else labels.tobytes()
        return zlib.crc32(known, zlib.crc32(f"{len(self)} {self.specs}".encode()))

    def identity(self) -> str | None:
        """Returns a text that tells this data from other data and from a changed version of it.

        The text may hold the names, sizes and times of all files. It is None if there is nothing to
        cache.
        """
        return None

    def changed(self, change: Callable[[Source], Source]) -> Source:
        """Returns this source after `change`.

        A slice of another source is the same slice of that source after `change`.
        """
        return change(self)


class OverSource(Source):
    """The examples of another source, `below`, in the same order, with a change of each of them."""

    def __init__(self, below: Source) -> None:
        self.below = below

    def __len__(self) -> int:
        return len(self.below)

    @property
    def specs(self) -> Any:
        return self.below.specs

    def where(self, index: int) -> str:
        return self.below.where(index)

    def labels(self) -> np.ndarray | None:
        return self.below.labels()

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        return self.below.read_labels(indices)


class IndexOrder(Protocol):
    """An order of examples, such as a `Permutation`."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the indices of the examples at the given positions of the order, int64."""


class SourceSlice(Source):
    """The examples at the positions [start, stop) of an order of another source.

    Args:
        source: the other source.
        start: the first position.
        stop: the position after the last one.
        order: the order of the examples of `source`. None: the order of its indices.
    """

    def __init__(
        self, source: Source, start: int, stop: int, order: IndexOrder | None = None
    ) -> None:
        self.source, self.start, self.stop, self.order = source, start, stop, order

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def specs(self) -> Any:
        return self.source.specs

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        return self.source.read(self._source_indices(indices), epoch)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.source.read_into(self._source_indices(indices), epoch, out)

    def where(self, index: int) -> str:
        return self.source.where(int(self._source_indices(np.array([index]))[0]))

    def labels(self) -> np.ndarray | None:
        labels = self.source.labels()
        return None if labels is None else labels[self._source_indices(np.arange(len(self)))]

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        return self.source.read_labels(self._source_indices(indices))

    def arrays(self) -> Arrays | None:
        source = self.source.arrays()
        if source is None:
            return None
        return source._replace(
            rows_of=lambda indices: source.rows_of(self._source_indices(indices))
        )

    def digest(self) -> int:
        return zlib.crc32(str(self.source.digest()).encode(), super().digest())

    def changed(self, change: Callable[[Source], Source]) -> Source:
        return SourceSlice(self.source.changed(change), self.start, self.stop, self.order)

    def _source_indices(self, indices: np.ndarray) -> np.ndarray:
        """Returns the indices in the whole source of the given indices of the slice."""
        positions = np.asarray(indices, np.int64) + self.start
        return positions if self.order is None else self.order.at(positions)


def _copy(rows: Any, out: np.ndarray) -> None:
    """Copies rows into `out`."""
    out[...] = rows


def map_nest(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Returns a nest with `function` applied to each leaf; lists become tuples.

    With more nests of the same form, it gets the same leaf of each of them, too.
    """
    if isinstance(nest, Mapping):
        return {
            key: map_nest(function, value, *(o[key] for o in others)) for key, value in nest.items()
        }
    if isinstance(nest, (tuple, list)) and not isinstance(nest, Leaf):
        return tuple(map_nest(function, *values) for values in zip(nest, *others, strict=True))
    return function(nest, *others)


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest as a list.

    The leaves of a dict come in the order of its sorted keys, as in TensorFlow.
    """
    if isinstance(nest, Mapping):
        return [leaf for key in sorted(nest) for leaf in leaves_of(nest[key])]
    if isinstance(nest, (tuple, list)) and not isinstance(nest, Leaf):
        return [leaf for value in nest for leaf in leaves_of(value)]
    return [nest]
