"""Columns of numbers and texts as vectors, by what the training rows hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfmulti.data.formats.columns import TEXT
from tfmulti.errors import DataError

MOST_CATEGORIES = 100


@dataclass(frozen=True)
class Encoder:
    """How rows become vectors [rows, values], and the mean and deviation of each value.

    `categories` are those of the text columns. Where a number is missing stands its `fill`. A
    value that is the same in all rows has the deviation 1; a category the mean 0 as well.
    """

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    fill: Mapping[str, float]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, place: str, columns: dict[str, np.ndarray], kinds: dict[str, str]) -> Encoder:
        """Returns the encoder that fits rows: {column: values [rows]}, with the columns' kinds.

        Raises:
            DataError: a text has too many categories, or a column no value at all.
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
    found = sorted({value for value in values if value is not None})
    if 0 < len(found) <= MOST_CATEGORIES:
        return tuple(found)
    count = f"{len(found):,} different texts, such as {found[0]!r}" if found else "no values"
    raise DataError(
        f"{place}: the column {column!r} has {count} in the training rows, but 1 to "
        f"{MOST_CATEGORIES} categories are read. Leave it out: drop={column}."
    )


def _moments(place: str, column: str, values: np.ndarray) -> tuple[float, float]:
    present = values[~np.isnan(values)].astype(np.float64)
    if not len(present):
        raise DataError(
            f"{place}: the column {column!r} has no values in the training rows. Leave it out: "
            f"drop={column}."
        )
    is_constant = present.min() == present.max()
    return float(present.mean()), 1.0 if is_constant else float(present.std())
