"""The column of a table that a model predicts: class labels, or numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfmulti.data.data_set import CLASSIFICATION
from tfmulti.data.formats.columns import FLAG, TEXT, WHOLE, Columns
from tfmulti.errors import DataError, did_you_mean

# Whole numbers with more different values are classes only if a classification is asked for.
MOST_CLASSES = 20


@dataclass(frozen=True)
class Target:
    """The column to predict.

    Attributes:
        column: the name of the column.
        classes: the values of the classes by their names, in the order of the labels. It is empty
            for a regression.
    """

    column: str
    classes: Mapping[str, Any]

    @classmethod
    def of(cls, prefix: str, columns: Columns, name: str, task: str) -> Target:
        """Returns the target that the training rows and the requested task define.

        Args:
            prefix: the start of messages, such as `--dataset csv:PATTERN`.
            columns: the training rows.
            name: the column to predict.
            task: CLASSIFICATION or REGRESSION. If it is empty, the values decide.

        Raises:
            DataError: a value is missing, there are too few or too many classes, or a regression is
                asked for and the column is text.
        """
        check_present(prefix, columns, name, "Remove such rows.")
        kind, rows = columns.kinds[name], len(columns.values[name])
        values = sorted(set(columns.values[name].tolist()))
        few = len(values) <= min(MOST_CLASSES, max(2, rows // 2))
        classifies = kind in (TEXT, FLAG) or (kind == WHOLE and few)
        if not (task == CLASSIFICATION if task else classifies):
            if kind == TEXT:
                raise DataError(
                    f"{prefix}: task=regression needs numbers, but the target {name!r} is "
                    f"{values[0]!r} in one row. Use another target, or task=classification."
                )
            return cls(name, {})
        if not 2 <= len(values) <= max(2, rows // 2):
            hint = "" if kind == TEXT else ", or task=regression"
            raise DataError(
                f"{prefix}: the target {name!r} has {len(values)} classes in {rows} rows, but it "
                f"needs two or more, and two rows for each. Use another target{hint}."
            )
        return cls(name, {_class_name(kind, value): value for value in values})

    def of_rows(self, prefix: str, columns: Columns) -> np.ndarray:
        """Returns the labels of rows, int32 [rows], or their values, float32 [rows, 1].

        Raises:
            DataError: a value is missing, is not finite, or is not a class of the training part.
        """
        check_present(prefix, columns, self.column, "Remove such rows.")
        if not self.classes:
            return finite(prefix, columns, self.column)[:, np.newaxis]
        label_of = {value: label for label, value in enumerate(self.classes.values())}
        values = columns.values[self.column].tolist()
        labels = np.array([label_of.get(value, -1) for value in values], np.int32)
        if labels.min() < 0:
            row = int(np.argmin(labels))
            name = _class_name(columns.kinds[self.column], values[row])
            raise DataError(
                f"{prefix}: the target {self.column!r} is {name!r} in {columns.where(row)}, which "
                f"no training file has; {did_you_mean(name, self.classes)} Repair or remove the "
                "row."
            )
        return labels


def _class_name(kind: str, value: Any) -> str:
    """Returns the name of the class that has a value."""
    if kind == FLAG:
        return "true" if value else "false"
    return value if kind == TEXT else f"{value:.15g}"


def check_present(prefix: str, columns: Columns, name: str, next_step: str) -> None:
    """Checks that each row has a value in a column; the error ends with `next_step`.

    Raises:
        DataError: a row has no value; the message says which.
    """
    missing = columns.missing(name)
    if missing.any():
        raise DataError(
            f"{prefix}: the column {name!r} has no value in "
            f"{columns.where(int(np.argmax(missing)))}. {next_step}"
        )


def finite(prefix: str, columns: Columns, name: str) -> np.ndarray:
    """Returns the numbers of a column as float32; a missing number stays NaN.

    Raises:
        DataError: a number is infinite, or too large for float32.
    """
    values = columns.values[name]
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    bad = np.isinf(numbers)
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(
            f"{prefix}: the column {name!r} is {values[row]:g} in {columns.where(row)}, which is "
            "not a finite float32 number. Repair or remove the row."
        )
    return numbers
