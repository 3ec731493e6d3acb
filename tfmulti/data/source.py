"""What a kind of data is to the rest: so many examples, each of which can be read by its number.

    Source                what `fit` takes; `len(source)`, `read(indices, epoch)`
    ├── ArraySource …     a file a kind of data (`arrays`, `images`, `tfrecord`, …)
    └── Part              some of the examples of another source, in an order of its own

Sharding, shuffling, splitting, caching and resuming are arithmetic on the numbers of the
examples, the same for every source.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class Leaf(NamedTuple):
    """The form of one array of an example: its shape without the row, and NumPy's dtype name.

    Text is `str`.
    """

    shape: tuple[int, ...]
    dtype: str


class Arrays(NamedTuple):
    """What rows can be gathered from: a nest of arrays in memory, and how rows come out of it.

    `specs` is the form in which they come out, and `rows_of` gives the rows of examples.
    """

    data: Any
    specs: Any
    rows_of: Callable[[np.ndarray], np.ndarray]


class Source(ABC):
    """Examples with random access."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples."""

    @property
    @abstractmethod
    def specs(self) -> Any:
        """The form of an example: a nest such as `(x, y)` of `Leaf`."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """Returns the examples of the given numbers, in that order.

        A nest as in `specs`, each leaf with one row an example: arrays, or TensorFlow's
        tensors. `epoch` changes what is random (augmentation), nothing else. May be called by
        several threads at once. `OSError` and `DataError` say that one of the examples cannot be
        read; the reader then asks for them one by one. Anything else is a fault of this code, and
        ends the run.
        """

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        """Writes the examples of the given numbers into `out`, a nest of arrays.

        A source that makes examples one by one does so in place, and spares a copy.
        """
        map_nest(_copy, self.read(indices, epoch), out)

    def where(self, index: int) -> str:
        """Returns where an example is, for messages: a file and a record."""
        return f"example {index}"

    def labels(self) -> np.ndarray | None:
        """Returns the class of each example, whole numbers, or None where that takes reading."""
        return None

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        """Returns the classes of these examples, read without the rest of them.

        None where that cannot be done. Exceptions are those of `read`.
        """
        labels = self.labels()
        return None if labels is None else labels[indices]

    def arrays(self) -> Arrays | None:
        """Returns what examples are rows of, where that is in memory already."""
        return None

    def digest(self) -> int:
        """Returns a number that is another one where the data is: by its size, form and labels.

        By it workers notice that they have not the same; examples are not read for that.
        """
        labels = self.labels()
        known = b"" if labels is None else labels.tobytes()
        return zlib.crc32(known, zlib.crc32(f"{len(self)} {self.specs}".encode()))

    def identity(self) -> str | None:
        """Returns what tells this data from other data and from a changed one.

        Such as the names, sizes and times of all files; None where there is nothing to cache.
        """
        return None

    def changed(self, change: Callable[[Source], Source]) -> Source:
        """Returns the same with the source that it is made of changed: of a part, the whole."""
        return change(self)


class OverSource(Source):
    """The examples of another source, `below`, in the same order, with something done to them."""

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
    """What gives examples for positions, such as a `Permutation`."""

    def at(self, positions: np.ndarray) -> np.ndarray: ...


class SourceSlice(Source):
    """The examples at the positions [start, stop) of an order of another source."""

    def __init__(
        self, whole: Source, start: int, stop: int, order: IndexOrder | None = None
    ) -> None:
        self.whole, self.start, self.stop, self.order = whole, start, stop, order

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def specs(self) -> Any:
        return self.whole.specs

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        return self.whole.read(self._in_whole(indices), epoch)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.whole.read_into(self._in_whole(indices), epoch, out)

    def where(self, index: int) -> str:
        return self.whole.where(int(self._in_whole(np.array([index]))[0]))

    def labels(self) -> np.ndarray | None:
        labels = self.whole.labels()
        return None if labels is None else labels[self._in_whole(np.arange(len(self)))]

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        return self.whole.read_labels(self._in_whole(indices))

    def arrays(self) -> Arrays | None:
        whole = self.whole.arrays()
        if whole is None:
            return None
        return whole._replace(rows_of=lambda indices: whole.rows_of(self._in_whole(indices)))

    def changed(self, change: Callable[[Source], Source]) -> Source:
        return SourceSlice(self.whole.changed(change), self.start, self.stop, self.order)

    def _in_whole(self, indices: np.ndarray) -> np.ndarray:
        positions = np.asarray(indices, np.int64) + self.start
        return positions if self.order is None else self.order.at(positions)


def _copy(rows: Any, out: np.ndarray) -> None:
    out[...] = rows


def map_nest(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Returns the nest (tuples, lists, dicts) with `function` applied to each leaf.

    `others` have the same form; their leaves are further arguments.
    """
    if isinstance(nest, Mapping):
        return {
            key: map_nest(function, value, *(o[key] for o in others)) for key, value in nest.items()
        }
    if isinstance(nest, (tuple, list)) and not isinstance(nest, Leaf):
        return tuple(map_nest(function, *values) for values in zip(nest, *others, strict=True))
    return function(nest, *others)


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest, dicts in the order of their sorted keys, as TensorFlow's."""
    if isinstance(nest, Mapping):
        return [leaf for key in sorted(nest) for leaf in leaves_of(nest[key])]
    if isinstance(nest, (tuple, list)) and not isinstance(nest, Leaf):
        return [leaf for value in nest for leaf in leaves_of(value)]
    return [nest]
