"""Slices of the parts of the data, as texts: `train[:90%]`, `train[90%:]`, `test[100:200]`.

The numbers in brackets are positions in a random order of the part, which depends on the seed. So
slices of data that is sorted by class have about the same mix of classes. Slices whose positions do
not overlap share no example.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from tfmulti.data.data_set import PARTS, DataSet
from tfmulti.data.hashing import key_of
from tfmulti.data.permutation import Permutation
from tfmulti.data.source import Source, SourceSlice
from tfmulti.errors import ConfigError, DataError, did_you_mean

_FORM = re.compile(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


@dataclass(frozen=True)
class Slice:
    """A slice of a part.

    Attributes:
        text: the slice as it was written.
        part: the name of the part.
        start: the first bound as it was written, or None.
        stop: the second bound as it was written, or None.
    """

    text: str
    part: str
    start: str | None
    stop: str | None

    def bounds(self, rows: int) -> tuple[int, int]:
        """Returns the positions [start, stop) of the slice in a part of `rows` examples."""
        return _position(self.start or "0", rows), _position(self.stop or f"{rows}", rows)


def parse_split(flag: str, text: str) -> Slice:
    """Returns the slice that a flag asks for.

    Raises:
        ConfigError: the text has another form, or there is no such part.

    >>> parse_split("training_split", "train[:90%]").bounds(1001)
    (0, 901)
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--{flag} {text} is not a split. Write a part's name, or with a slice of it: "
            "train[:90%], train[90%:], train[1000:2000]."
        )
    if match[1] not in PARTS:
        raise ConfigError(f"--{flag} {text}: no part {match[1]!r}; {did_you_mean(match[1], PARTS)}")
    return Slice(text, match[1], match[2], match[3])


def with_splits(data: DataSet, splits: dict[str, str | None], seed: int) -> DataSet:
    """Returns the data, with the parts replaced by the slices that were asked for.

    `splits` has the text of a slice for each part; None leaves the part as it is. The seed decides
    the order in which slices are taken.

    Raises:
        DataError: the data has no such part, a part cannot be sliced, or a slice is empty.
        ConfigError: two slices overlap.
    """
    wanted = {
        part: parse_split(_flag(part), text) for part, text in splits.items() if text is not None
    }
    if not wanted:
        return data
    slices = {part: Slice(part, part, None, None) for part in data.parts} | wanted
    _check_apart(data, {part: slices[part] for part in PARTS if part in slices})
    sliced: dict[str, Any] = {
        part: _sliced(data, part, slice_, seed) for part, slice_ in wanted.items()
    }
    return replace(data, **sliced)


def with_validation(data: DataSet, fraction: float, seed: int) -> DataSet:
    """Returns the data with a validation part, which is taken at random from the training part.

    It has `fraction` of the training examples. The data stays as it is if the fraction is 0, if it
    has a validation part, or if its training part is not a `Source`.

    Raises:
        DataError: one of the two parts would be empty.
    """
    if data.validation is not None or not fraction or not isinstance(data.train, Source):
        return data
    rows = len(data.train)
    count = round(rows * fraction)
    if not 0 < count < rows:
        raise DataError(
            f"--validation_fraction {fraction} of {rows} training examples leaves one part "
            "empty. Use another fraction, or 0 for no validation."
        )
    order = Permutation(rows, key_of(seed, rows))
    return replace(
        data,
        train=SourceSlice(data.train, count, rows, order),
        validation=SourceSlice(data.train, 0, count, order),
    )


def _flag(part: str) -> str:
    """Returns the name of the flag for a part."""
    return "training_split" if part == "train" else f"{part}_split"


def _position(bound: str, rows: int) -> int:
    """Returns the position of a bound such as `90%` or `-100` in a part of `rows` examples."""
    number = int(bound.removesuffix("%"))
    position = round(rows * number / 100) if bound.endswith("%") else number
    return min(max(position + rows if bound.startswith("-") else position, 0), rows)


def _sliced(data: DataSet, part: str, slice_: Slice, seed: int) -> Source:
    """Returns a slice of a part; raises DataError if there is no such part, or nothing in it."""
    source = getattr(data, slice_.part)
    if source is None:
        raise DataError(
            f"--{_flag(part)} {slice_.text}: the data has no {slice_.part} part. It has: "
            f"{', '.join(data.parts)}."
        )
    if not isinstance(source, Source):
        raise DataError(
            f"--{_flag(part)} {slice_.text}: the {slice_.part} part comes in whole batches, so no "
            "examples can be taken out. Split the data where it is made."
        )
    rows = len(source)
    start, stop = slice_.bounds(rows)
    if stop <= start:
        raise DataError(
            f"--{_flag(part)} {slice_.text} is empty: {rows} examples from {start} to {stop}."
        )
    if slice_.start is None and slice_.stop is None:
        return source
    return SourceSlice(source, start, stop, Permutation(rows, key_of(seed, rows)))


def _check_apart(data: DataSet, slices: dict[str, Slice]) -> None:
    """Raises ConfigError if two parts share examples."""
    for (part, first), (other_part, second) in itertools.combinations(slices.items(), 2):
        source = getattr(data, first.part)
        if first.part != second.part or not isinstance(source, Source):
            continue
        starts, stops = zip(first.bounds(len(source)), second.bounds(len(source)), strict=True)
        shared = min(stops) - max(starts)
        if shared > 0:
            raise ConfigError(
                f"--{_flag(part)} {first.text} and --{_flag(other_part)} {second.text} overlap: "
                f"both have {shared} of the {len(source)} {first.part} examples. "
                "Write them apart, such as train[:90%] and train[90%:]."
            )
