"""A source of examples that are stored as encoded records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfmulti.data.buffers import empty, empty_rows
from tfmulti.data.formats.records import ByteStrings
from tfmulti.data.io.files import MOST_BYTES
from tfmulti.data.source import Leaf, Source, map_nest
from tfmulti.errors import DataError

ParseInto = Callable[[Sequence[bytes], Mapping[str, np.ndarray]], None]


@dataclass(frozen=True)
class Decoder:
    """How encoded examples become arrays.

    Attributes:
        names: the form of an example, a nest with the names of features as leaves.
        leaves: the form of the value of each name.
        parse_into: writes the named features of encoded examples into arrays.
        classes: the number of classes if the target is one name whose values are labels from 0 to
            `classes` - 1; otherwise None.
        parse_label: does the work of `parse_into` for the label alone, without setting up
            TensorFlow's devices. None if `parse_into` itself does not set them up.

    Raises:
        DataError: the value of a name takes more bytes than a file that is one example may have.
    """

    names: Any
    leaves: Mapping[str, Leaf]
    parse_into: ParseInto
    classes: int | None = None
    parse_label: ParseInto | None = None

    def __post_init__(self) -> None:
        for name, leaf in self.leaves.items():
            dtype = np.dtype(object if leaf.dtype == "str" else leaf.dtype)
            size = math.prod(leaf.shape) * dtype.itemsize
            if size > MOST_BYTES:
                raise DataError(
                    f"feature {name!r} has the shape {list(leaf.shape)}, which is {size:,} bytes "
                    f"of each example, more than {MOST_BYTES:,}. Correct its shape."
                )

    @property
    def specs(self) -> Any:
        """The form of an example: a nest of `Leaf`."""
        return map_nest(lambda name: self.leaves[name], self.names)

    def decode(self, records: Sequence[bytes]) -> Any:
        """Returns the examples of encoded records, a nest as in `specs` with a row for each record.

        Raises:
            ValueError: a record cannot be read; the message says why.
        """
        out = empty_rows(self.specs, len(records))
        self.decode_into(records, out)
        return out

    def decode_into(self, records: Sequence[bytes], out: Any) -> None:
        """Writes the examples of encoded records into `out`, a nest of arrays as in `specs`.

        Raises:
            ValueError: a record cannot be read; the message says why.
        """
        arrays_of: dict[str, list[np.ndarray]] = {}
        map_nest(lambda name, rows: arrays_of.setdefault(name, []).append(rows), self.names, out)
        self.parse_into(records, {name: arrays[0] for name, arrays in arrays_of.items()})
        for first, *others in arrays_of.values():
            # A feature that is both input and target is parsed once and copied.
            for other in others:
                other[...] = first
        if self.classes is not None:
            check_labels(arrays_of[self.names[1]][0], self.classes, self.names[1])

    def labels_of(self, records: Sequence[bytes]) -> np.ndarray | None:
        """Returns the labels of encoded examples, int [records]; None if the target is not a label.

        Raises:
            ValueError: a record cannot be read; the message says why.
        """
        if self.classes is None:
            return None
        name = self.names[1]
        labels = empty((len(records), *self.leaves[name].shape), self.leaves[name].dtype)
        (self.parse_label or self.parse_into)(records, {name: labels})
        check_labels(labels, self.classes, name)
        return labels.reshape(len(records))


class EncodedSource(Source):
    """Encoded examples with random access, which `decoder` turns into arrays."""

    def __init__(self, records: ByteStrings, decoder: Decoder) -> None:
        self.records, self.decoder = records, decoder

    def __len__(self) -> int:
        return len(self.records)

    @property
    def specs(self) -> Any:
        return self.decoder.specs

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        return self.decoder.decode(self.records.read(indices))

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.decoder.decode_into(self.records.read(indices), out)

    def read_labels(self, indices: np.ndarray) -> np.ndarray | None:
        return self.decoder.labels_of(self.records.read(indices))

    def where(self, index: int) -> str:
        return self.records.where(index)

    def identity(self) -> str:
        decoder = self.decoder
        form = f"{decoder.names} {dict(decoder.leaves)} {decoder.classes}"
        return f"{form}\n{self.records.identity()}"


def check_labels(labels: np.ndarray, classes: int, name: str) -> None:
    """Checks that all labels are from 0 to `classes` - 1.

    Raises:
        DataError: a label is not; the message gives its value and `name`, the feature.
    """
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        raise DataError(
            f"{name!r} is {labels[outside].reshape(-1)[0]}, out of range 0..{classes - 1}"
        )
