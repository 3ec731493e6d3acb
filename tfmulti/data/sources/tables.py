"""CSV and Parquet files as a data set, in which each row is an example.

    --dataset csv:PATTERN,target=COLUMN
    --dataset parquet:PATTERN,target=COLUMN,test=PATTERN,drop=COLUMN+COLUMN

A pattern is a file, a glob or a folder of files, on this machine or in a store such as `gs://`. The
options are:

    target       the column to predict
    weight       the column of sample weights
    task         classification or regression. By default it is classification if the target is
                 text, or true and false, or at most 20 different whole numbers with at least
                 twice as many rows. Any other target is a regression
    drop         the columns to leave out, joined by +
    missing      mean: a missing number (or NaN) becomes the mean of the training rows, and a
                 missing text belongs to no category. Without it a missing value is an error
    validation   the files of the validation part; without it, --validation_fraction is taken
    test         the files of the test part

An example is one float32 vector, made of the columns in the order of the first file. A column of
numbers gives one value. So does a column of true (1) and false (0). A column of text gives one
value for each category: 1 for the category of the row, and 0 for the others. The categories are the
sorted texts of the training rows. A text that they lack gives zeros only. The file features.txt in
the run directory names the values in their order. The tables are held in memory.

A row of a CSV file that has more or fewer columns than the header is an error. --skip_bad_records N
leaves out up to N such rows in all files together. A damaged Parquet file is always an error.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.bad_records import naming_the_first
from tfmulti.data.data_set import CLASSIFICATION, REGRESSION, DataSet, DataSpec
from tfmulti.data.formats.columns import (
    CSV,
    PARQUET,
    TEXT,
    Columns,
    lost_of,
    read_parts,
    read_tables,
    to_columns,
)
from tfmulti.data.options import parse_options
from tfmulti.data.transforms.encoding import Encoder
from tfmulti.data.transforms.targets import Target, check_present, finite
from tfmulti.errors import ConfigError, DataError, did_you_mean

_OPTIONS = ("target", "weight", "task", "drop", "missing", "validation", "test")


def load_csv(options: str, seed: int) -> DataSet:
    """Returns the data of `PATTERN,target=COLUMN[,…]`; the module describes the options.

    Raises:
        ConfigError: an option is wrong.
        DataError: a file is missing, damaged or unlike the others, or a value cannot be used.
    """
    return _load(CSV, options)


def load_parquet(options: str, seed: int) -> DataSet:
    """Returns the data of `PATTERN,target=COLUMN[,…]` as `load_csv` does.

    Raises:
        ConfigError, DataError: as `load_csv` does.
    """
    return _load(PARQUET, options)


def _load(form: str, options: str) -> DataSet:
    """Returns the data of CSV or Parquet files."""
    pattern, _, rest = options.partition(",")
    prefix = f"--dataset {form}:{pattern}"
    if not pattern:
        raise DataError(f"{prefix} needs a file. Write --dataset {form}:PATH,target=COLUMN.")
    chosen = parse_options(f"{form}:{pattern}", rest, dict.fromkeys(_OPTIONS, ""))
    _check_choices(prefix, chosen)
    train = read_tables(prefix, form, pattern)
    features = _features(prefix, train[0].rows.column_names, chosen)
    tables = read_parts(prefix, form, train, chosen)
    lost = lost_of(*tables.values())
    with naming_the_first(lost):
        names = [*features, chosen["target"], *filter(None, [chosen["weight"]])]
        columns = {"train": to_columns(prefix, train, names)}
        for part in tables:
            if part != "train":
                columns[part] = to_columns(prefix, tables[part], names, columns["train"].kinds)
        target = Target.of(prefix, columns["train"], chosen["target"], chosen["task"])
        fills = chosen["missing"] == "mean"
        sources: dict[str, Any] = {
            part: ArraySource(
                (
                    {name: _feature(prefix, rows, name, fills) for name in features},
                    target.of_rows(prefix, rows),
                    *([_weights(prefix, rows, chosen["weight"])] if chosen["weight"] else []),
                )
            )
            for part, rows in columns.items()
        }
    kinds = {name: columns["train"].kinds[name] for name in features}
    fit = functools.partial(_fitted, prefix, kinds, target)
    return DataSet(fit=fit, lost=lost, **sources)


def _fitted(prefix: str, kinds: dict[str, str], target: Target, data: DataSet) -> DataSet:
    """Returns the data as vectors, which an encoder makes that is fitted to the training part."""
    rows = {name: part.read(np.arange(len(part))) for name, part in data.parts.items()}
    encoder = Encoder.of(prefix, rows["train"][0], kinds)
    vectors: dict[str, Any] = {
        name: ArraySource((encoder(x), *y)) for name, (x, *y) in rows.items()
    }
    spec = DataSpec(
        (len(encoder.names),),
        "float32",
        CLASSIFICATION if target.classes else REGRESSION,
        outputs=len(target.classes) or 1,
        input_mean=encoder.mean,
        input_std=encoder.std,
        class_names=tuple(target.classes) or None,
    )
    return replace(data, spec=spec, features=encoder.names, **vectors)


def _feature(prefix: str, columns: Columns, name: str, fills: bool) -> np.ndarray:
    """Returns the values of a column; raises DataError for a missing one unless `fills` is set."""
    if not fills:
        check_present(prefix, columns, name, f"Correct it, or give missing=mean or drop={name}.")
    return columns.values[name] if columns.kinds[name] == TEXT else finite(prefix, columns, name)


def _weights(prefix: str, columns: Columns, name: str) -> np.ndarray:
    """Returns the sample weights, float32 [rows]; raises DataError if one is wrong."""
    if columns.kinds[name] == TEXT:
        raise DataError(f"{prefix}: the weights {name!r} are text. Give a column of numbers.")
    check_present(prefix, columns, name, "Correct it.")
    weights = finite(prefix, columns, name)
    if weights.min() < 0:
        row = int(np.argmin(weights))
        raise DataError(
            f"{prefix}: the weight {name!r} is {weights[row]:g} in {columns.where(row)}, but it "
            "must not be below 0. Correct it."
        )
    return weights


def _features(prefix: str, names: list[str], chosen: dict[str, str]) -> list[str]:
    """Returns the columns that are inputs, in their order; raises if an option is wrong."""
    if not chosen["target"]:
        raise ConfigError(
            f"{prefix} needs the column to predict: target=COLUMN. Known: {', '.join(names)}."
        )
    used = {"target": [chosen["target"]], "drop": list(filter(None, chosen["drop"].split("+")))}
    used["weight"] = list(filter(None, [chosen["weight"]]))
    option_of: dict[str, str] = {}
    for option, columns in used.items():
        for column in columns:
            if column not in names:
                raise ConfigError(
                    f"{prefix}: {option}={column}: no such column; {did_you_mean(column, names)}"
                )
            if column in option_of:
                raise ConfigError(
                    f"{prefix}: the column {column!r} is given for {option_of[column]} and "
                    f"{option}. Give it once."
                )
            option_of[column] = option
    features = [name for name in names if name not in option_of]
    if not features:
        raise DataError(f"{prefix}: no column is left to predict from. Drop fewer columns.")
    return features


def _check_choices(prefix: str, chosen: dict[str, str]) -> None:
    """Raises ConfigError if the task, or the rule for missing values, is unknown."""
    for option, known in (("task", (CLASSIFICATION, REGRESSION)), ("missing", ("mean",))):
        if chosen[option] and chosen[option] not in known:
            raise ConfigError(
                f"{prefix}: {option} is {chosen[option]!r}; {did_you_mean(chosen[option], known)}"
            )
