"""Turns columns of numbers and texts into vectors, by the values of the training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfmulti.data.formats.columns import TEXT
from tfmulti.errors import DataError

# A column of text with more categories is refused.
MOST_CATEGORIES = 100


@dataclass(frozen=True)
class Encoder:
    """How rows become vectors [rows, values], with the mean and deviation of each value.

    Attributes:
        names: the names of the values.
        categories: the categories of each column of text.
        fill: for each column of numbers the value that replaces a missing number.
        mean: the mean of each value in the training rows; 0 for a category.
        std: the standard deviation of each value; 1 for a category, and for a column whose numbers
            are all the same.
    """

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    fill: Mapping[str, float]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, place: str, columns: dict[str, np.ndarray], kinds: dict[str, str]) -> Encoder:
        """Returns the encoder that fits the training rows.

        Args:
            place: the start of messages, such as `--dataset csv:PATTERN`.
            columns: the values of the training rows, by column.
            kinds: the kind of each column, as in `columns.Columns`.

        Raises:
            DataError: a column of text has too many categories, or a column has no values.
        """
        names: list[str] = []
        moments: list[tuple[float, float]] = []
        categories, fill = {}, {}
        for column, values in columns.items():
            if kinds[column] == TEXT:
                found = _categories(place, column, values)
                categories[column] = found
                names += [f"{column}={category}" for category in found]
                moments += [(0.0, 1.0)] * len(found)
            else:
                moments.append(_moments(place, column, values))
                fill[column] = moments[-1][0]
                names.append(column)
        mean, std = zip(*moments, strict=True)
        return cls(tuple(names), categories, fill, mean, std)

    def __call__(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the rows of these columns as vectors, float32 [rows, values]."""
        rows = len(next(iter(columns.values())))
        vectors, at = np.zeros((rows, len(self.names)), np.float32), 0
        for column, values in columns.items():
            if column in self.fill:
                vectors[:, at] = np.where(np.isnan(values), self.fill[column], values)
                at += 1
                continue
            places = {text: at + i for i, text in enumerate(self.categories[column])}
            codes = np.array([places.get(text, -1) for text in values])
            known = np.flatnonzero(codes >= 0)
            vectors[known, codes[known]] = 1.0
            at += len(places)
        return vectors


def _categories(place: str, column: str, values: np.ndarray) -> tuple[str, ...]:
    """Returns the sorted texts of a column; raises DataError if they are none or too many."""
    found = sorted({value for value in values if value is not None})
    if 0 < len(found) <= MOST_CATEGORIES:
        return tuple(found)
    count = f"{len(found):,} different texts, such as {found[0]!r}" if found else "no values"
    raise DataError(
        f"{place}: the column {column!r} has {count} in the training rows, but 1 to "
        f"{MOST_CATEGORIES} categories are read. Leave it out: drop={column}."
    )


def _moments(place: str, column: str, values: np.ndarray) -> tuple[float, float]:
    """Returns the mean and the deviation of a column; raises DataError if it has no values."""
    present = values[~np.isnan(values)].astype(np.float64)
    if not len(present):
        raise DataError(
            f"{place}: the column {column!r} has no values in the training rows. Leave it out: "
            f"drop={column}."
        )
    is_constant = present.min() == present.max()
    return float(present.mean()), 1.0 if is_constant else float(present.std())
