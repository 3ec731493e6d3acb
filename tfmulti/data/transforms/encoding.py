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
    def of(cls, prefix: str, columns: dict[str, np.ndarray], kinds: dict[str, str]) -> Encoder:
        """Returns the encoder that fits the training rows.

        Args:
            prefix: the start of messages, such as `--dataset csv:PATTERN`.
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
                texts = _categories(prefix, column, values)
                categories[column] = texts
                names += [f"{column}={category}" for category in texts]
                moments += [(0.0, 1.0)] * len(texts)
            else:
                moments.append(_moments(prefix, column, values))
                fill[column] = moments[-1][0]
                names.append(column)
        mean, std = zip(*moments, strict=True)
        return cls(tuple(names), categories, fill, mean, std)

    def __call__(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the rows of these columns as vectors, float32 [rows, values]."""
        rows = len(next(iter(columns.values())))
        vectors, position = np.zeros((rows, len(self.names)), np.float32), 0
        for column, values in columns.items():
            if column in self.fill:
                vectors[:, position] = np.where(np.isnan(values), self.fill[column], values)
                position += 1
                continue
            positions = {text: position + i for i, text in enumerate(self.categories[column])}
            codes = np.array([positions.get(text, -1) for text in values])
            known = np.flatnonzero(codes >= 0)
            vectors[known, codes[known]] = 1.0
            position += len(positions)
        return vectors


def _categories(prefix: str, column: str, values: np.ndarray) -> tuple[str, ...]:
    """Returns the sorted texts of a column; raises DataError if they are none or too many."""
    texts = sorted({value for value in values if value is not None})
    if 0 < len(texts) <= MOST_CATEGORIES:
        return tuple(texts)
    count = f"{len(texts):,} different texts, such as {texts[0]!r}" if texts else "no values"
    raise DataError(
        f"{prefix}: the column {column!r} has {count} in the training rows, but 1 to "
        f"{MOST_CATEGORIES} categories are read. Leave it out: drop={column}."
    )


def _moments(prefix: str, column: str, values: np.ndarray) -> tuple[float, float]:
    """Returns the mean and the deviation of a column; raises DataError if it has no values."""
    present = values[~np.isnan(values)].astype(np.float64)
    if not len(present):
        raise DataError(
            f"{prefix}: the column {column!r} has no values in the training rows. Leave it out: "
            f"drop={column}."
        )
    is_constant = present.min() == present.max()
    return float(present.mean()), 1.0 if is_constant else float(present.std())
