"""Columns of CSV and Parquet files, read by pyarrow; all files of a data set have the same ones.

Messages count rows from 1. The header and the empty lines of a CSV file do not count. Rows that
cannot be read are left out of a CSV file (`csv_tables`). The caller gets them from `lost_of` and
decides whether they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfmulti.data.formats.arrow import arrow
from tfmulti.data.formats.csv_tables import read_csv
from tfmulti.data.formats.parquet_tables import read_parquet
from tfmulti.data.io import files
from tfmulti.errors import DataError

CSV, PARQUET = "csv", "parquet"
FLAG, WHOLE, NUMBER, TEXT = "bool", "whole", "number", "text"


class _Form(NamedTuple):
    """A form of files.

    Attributes:
        extensions: the ends of the names of its files.
        read: takes the content of a file, and whether GZIP has packed it. It returns the rows, and
            why rows are left out, as in `Table`.
        is_typed: whether the columns have types, as in `Table`.
    """

    extensions: tuple[str, ...]
    read: Callable[[bytes, bool], tuple[Any, dict[int, str]]]
    is_typed: bool


_FORMS = {
    CSV: _Form((".csv", ".csv.gz"), read_csv, is_typed=False),
    PARQUET: _Form((".parquet",), lambda data, _: (read_parquet(data), {}), is_typed=True),
}


class Table(NamedTuple):
    """The rows of one file.

    Attributes:
        path: the file.
        rows: the rows that can be read, a `pyarrow.Table`.
        bad: why rows are left out, by their numbers from 1, in the order of the file.
        is_typed: whether the columns have types. Those of a CSV file have none: all are text.
    """

    path: str
    rows: Any
    bad: dict[int, str]
    is_typed: bool

    def where(self, row: int) -> str:
        """Returns the place of a row, such as `row 3 of a.csv`.

        `row` counts from 0 and without the rows that are left out.
        """
        number = row + 1
        for bad in self.bad:
            number += bad <= number
        return f"row {number} of {self.path}"


class Columns(NamedTuple):
    """The rows of all files, by column.

    Attributes:
        values: the values of each column. Numbers are float64 [rows], with NaN for a missing one.
            Text is an array of objects [rows], with None for a missing one.
        kinds: the kind of each column in the files: FLAG, WHOLE, NUMBER or TEXT.
        tables: the tables from which the columns come.
        ends: for each file the index of the row after its last one.
    """

    values: dict[str, np.ndarray]
    kinds: dict[str, str]
    tables: list[Table]
    ends: np.ndarray

    def where(self, row: int) -> str:
        """Returns the place of a row, such as `row 3 of a.csv`; `row` counts from 0."""
        file, row_in_file = files.locate(self.ends, row)
        return self.tables[file].where(row_in_file)

    def missing(self, name: str) -> np.ndarray:
        """Returns which rows have no value in a column, bool [rows]."""
        values = self.values[name]
        if self.kinds[name] == TEXT:
            return np.array([value is None for value in values], bool)
        absent: np.ndarray = np.isnan(values)
        return absent


def form_of(pattern: str) -> str | None:
    """Returns the form of the files that a pattern matches by its end, or None if it is unknown."""
    return next((name for name, form in _FORMS.items() if pattern.endswith(form.extensions)), None)


def read_tables(
    prefix: str, form: str, pattern: str, names: Sequence[str] | None = None
) -> list[Table]:
    """Returns the tables of all files that a pattern matches; all have the same columns.

    Args:
        prefix: the start of messages, such as `--dataset csv:PATTERN`.
        form: CSV or PARQUET.
        pattern: a file, a folder or a glob.
        names: the columns that every file must have. None: those of the first file.

    Raises:
        DataError: there are no files or no rows, a file cannot be read, or its columns differ.
    """
    tables = []
    for path in files.matching(prefix, pattern, _FORMS[form].extensions):
        table = _read(prefix, form, path)
        columns = table.rows.column_names
        names = columns if names is None else names
        _check_names(prefix, path, columns, names)
        tables.append(table)
    if not sum(table.rows.num_rows for table in tables):
        bad = "".join(f" that can be read: {lost}" for lost in lost_of(tables)[:1]).rstrip(".")
        raise DataError(f"{prefix}: {pattern} has no rows{bad}. Give files with at least one.")
    return tables


def read_parts(
    prefix: str, form: str, train: list[Table], patterns: Mapping[str, str]
) -> dict[str, list[Table]]:
    """Returns the tables of the training part, and of each other part that has a pattern.

    Args:
        prefix: the start of messages.
        form: CSV or PARQUET.
        train: the tables of the training part.
        patterns: the patterns of `validation` and `test`; empty if there is no such part.

    Raises:
        DataError: as in `read_tables`, or a file is in two parts.
    """
    tables = {"train": train}
    part_of = {table.path: "training" for table in train}
    for part in ("validation", "test"):
        if not patterns[part]:
            continue
        tables[part] = read_tables(prefix, form, patterns[part], train[0].rows.column_names)
        for path in (table.path for table in tables[part]):
            if path in part_of:
                raise DataError(
                    f"{prefix}: {path} is in the {part_of[path]} part and in the {part} part. Give "
                    "patterns that have no file in common."
                )
            part_of[path] = part
    return tables


def lost_of(*parts: list[Table]) -> tuple[str, ...]:
    """Returns where the left-out rows of the tables of all parts are, and why."""
    return tuple(
        f"row {number} of {table.path}: {reason}"
        for tables in parts
        for table in tables
        for number, reason in table.bad.items()
    )


def to_columns(
    prefix: str, tables: list[Table], names: Sequence[str], kinds: dict[str, str] | None = None
) -> Columns:
    """Returns the named columns of all tables.

    A column is text if one of its values is neither a number nor true or false like the others.

    Args:
        prefix: the start of messages.
        tables: the tables of one part.
        names: the columns to return.
        kinds: the kinds of the columns in the training part, when another part is read. None: the
            kinds follow from the values.

    Raises:
        DataError: a column has no values, a column has a type that is not read, or a value is not
            of the kind of its column.
    """
    if kinds is None:
        kinds = {name: _common_kind(prefix, tables, name) for name in names}
    values = {
        name: np.concatenate([_values(prefix, table, name, kinds[name]) for table in tables])
        for name in names
    }
    ends = np.cumsum([table.rows.num_rows for table in tables])
    return Columns(values, kinds, tables, ends)


def _read(prefix: str, form: str, path: str) -> Table:
    """Returns the table of a file; raises DataError if the file cannot be read."""
    pyarrow = arrow()
    try:
        # pyarrow gets bytes and not a path. So local and remote files are read in one way, and the
        # table is held in memory anyway.
        data = files.read_bytes(path)
        rows, bad = _FORMS[form].read(data, path.endswith(".gz"))
        return Table(path, rows, bad, _FORMS[form].is_typed)
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = files.reason_of(error)
    raise DataError(f"{prefix}: {path} cannot be read: {reason}. Repair or remove it.")


def _check_names(prefix: str, path: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raises DataError if the columns of a file do not have these names, each once."""
    if duplicates := [name for name in columns if list(columns).count(name) > 1]:
        problem = f"has the column {duplicates[0]!r} twice. Rename one of them."
    elif missing := [name for name in names if name not in columns]:
        problem = (
            f"lacks the column {missing[0]!r}; it has {', '.join(columns)}. Give all files the "
            "same columns."
        )
    elif unknown := [name for name in columns if name not in names]:
        problem = (
            f"has a column {unknown[0]!r}, which the first file of the training part does not "
            "have. Give all files the same columns."
        )
    else:
        return
    raise DataError(f"{prefix}: {path} {problem}")


def _common_kind(prefix: str, tables: list[Table], name: str) -> str:
    """Returns the kind that fits a column in all tables; raises DataError if there is none."""
    kinds = {_kind(prefix, table, name) for table in tables} - {None}
    if not kinds:
        raise DataError(f"{prefix}: the column {name!r} has no values. Leave it out: drop={name}.")
    if kinds == {WHOLE, NUMBER}:
        return NUMBER
    return str(kinds.pop()) if len(kinds) == 1 else TEXT


def _kind(prefix: str, table: Table, name: str) -> str | None:
    """Returns the kind of a column of one file, or None if the column has no values."""
    array = table.rows.column(name)
    kind = _kind_of_type(prefix, table, name)
    if array.null_count == len(array):
        return None
    return kind if table.is_typed else _kind_of_text(array)


def _kind_of_type(prefix: str, table: Table, name: str) -> str:
    """Returns the kind of a column's type; raises DataError for types that are not read."""
    types, array = arrow("pyarrow").types, table.rows.column(name)
    if _is_text(array) or types.is_null(array.type):
        return TEXT
    if types.is_boolean(array.type):
        return FLAG
    if types.is_integer(array.type):
        return WHOLE
    if types.is_floating(array.type) or types.is_decimal(array.type):
        return NUMBER
    raise DataError(
        f"{prefix}: the column {name!r} of {table.path} is of type {array.type}, but numbers, "
        f"booleans and text are read. Leave it out: drop={name}."
    )


def _is_text(array: Any) -> bool:
    """Returns whether an array of pyarrow holds text."""
    types = arrow("pyarrow").types
    return bool(types.is_string(array.type) or types.is_large_string(array.type))


def _kind_of_text(array: Any) -> str:
    """Returns the narrowest kind to which all texts of a column can be converted."""
    for kind in (FLAG, WHOLE, NUMBER):
        try:
            _cast(array, kind)
        except ValueError:
            continue
        return kind
    return TEXT


def _cast(array: Any, kind: str) -> Any:
    """Returns an array of pyarrow, converted to a kind.

    Raises:
        ValueError: a value is not of that kind (`ArrowInvalid` is a ValueError).
    """
    pyarrow, compute = arrow(), arrow("pyarrow.compute")
    if kind == TEXT:
        return compute.cast(array, pyarrow.string())
    if not _is_text(array):
        # A safe cast would refuse 2**53 + 1, which float64 rounds to 2**53.
        numbers = compute.cast(array, pyarrow.float64(), safe=False)
        known = compute.is_in(numbers, value_set=pyarrow.array([0.0, 1.0, None]))
        if kind == FLAG and not compute.all(known).as_py():
            raise ValueError
        return numbers
    if kind == FLAG:
        small = compute.utf8_lower(array)
        known = compute.is_in(small, value_set=pyarrow.array(["true", "false", None]))
        if not compute.all(known).as_py():
            raise ValueError
        return compute.cast(compute.equal(small, "true"), pyarrow.float64())
    return compute.cast(array, pyarrow.int64() if kind == WHOLE else pyarrow.float64())


def _values(prefix: str, table: Table, name: str, kind: str) -> np.ndarray:
    """Returns the values of a column, float64 or objects; raises DataError for a wrong one."""
    array = table.rows.column(name)
    _kind_of_type(prefix, table, name)
    # 1.5 is a valid number in a column that has only whole numbers in the training part.
    kind = NUMBER if kind == WHOLE else kind
    try:
        values: np.ndarray = _cast(array, kind).to_numpy()
    except ValueError:
        row = _first_bad(array, kind)
        expected = "true or false" if kind == FLAG else "a number"
        raise DataError(
            f"{prefix}: the column {name!r} is {array[row].as_py()!r} in "
            f"{table.where(row)}, but it is {expected} in the training part. Correct it."
        ) from None
    if kind == TEXT:
        return values.astype(object)
    return values


def _first_bad(array: Any, kind: str) -> int:
    """Returns the index of the first row whose value is not of a kind, by bisection."""
    # The first `good` rows are all of the kind, and the first `bad` rows are not.
    good, bad = 0, len(array)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            _cast(array.slice(0, middle), kind)
            good = middle
        except ValueError:
            bad = middle
    return good
