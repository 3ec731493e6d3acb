"""Tests how columns of CSV and Parquet files become vectors, and the errors for wrong files."""

from __future__ import annotations

import builtins
import gzip
import importlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tfmulti.config.fit_config import FitConfig
from tfmulti.data.bad_records import check_lost
from tfmulti.data.data_set import DataSet, fitted
from tfmulti.data.formats import csv_tables, parquet_tables
from tfmulti.data.sources import tables
from tfmulti.data.transforms.splits import with_validation
from tfmulti.errors import ConfigError, DataError
from tfmulti.run.validation import load_data

ROWS = ["1,red,a", "2,blue,b", "3,red,a", "4,green,b"]
HEADER = "n,color,y\n"
SMALL = HEADER + "\n".join(ROWS) + "\n"


def csv(folder: Path, text: str = SMALL, name: str = "t.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def column(name: str, values: Sequence[object], y: str = "ab") -> str:
    """Returns a CSV file of one column, and a target."""
    rows = [f"{value},{y[i % len(y)]}" for i, value in enumerate(values)]
    return "\n".join([f"{name},y", *rows]) + "\n"


def loaded(options: str, fraction: float = 0.0, most_bad: int = 0) -> DataSet:
    data = tables.load_csv(options, 0)
    check_lost(data.lost, most_bad)
    return fitted(with_validation(data, fraction, seed=1))


def rows_of(part: Any) -> Any:
    return part.read(np.arange(len(part)))


def test_columns_become_vectors(tmp_path: Path) -> None:
    data = loaded(f"{csv(tmp_path)},target=y")
    x, y = rows_of(data.train)
    assert data.features == ("n", "color=blue", "color=green", "color=red")
    assert x.tolist() == [[1, 0, 0, 1], [2, 1, 0, 0], [3, 0, 0, 1], [4, 0, 1, 0]]
    assert (x.dtype, y.dtype, y.tolist()) == ("float32", "int32", [0, 1, 0, 1])
    spec = data.spec
    assert spec is not None
    assert (spec.input_shape, spec.kind, spec.outputs) == ((4,), "vector", 2)
    assert (spec.input_mean, spec.input_std) == ((2.5, 0, 0, 0), (1.25**0.5, 1, 1, 1))
    assert spec.describe() == "4, 2 classes: a, b"


def test_statistics_are_of_the_training_rows(tmp_path: Path) -> None:
    """Rows of the validation part change neither means nor categories."""
    values = np.random.default_rng(3).integers(1000, size=40)
    lines = [f"{v},c{i},{'ab'[i % 2]}" for i, v in enumerate(values)]
    data = loaded(f"{csv(tmp_path, 'n,c,y' + chr(10) + chr(10).join(lines))},target=y", 0.25)
    x, held_out = rows_of(data.train)[0], rows_of(data.validation)[0]
    assert (len(x), len(held_out)) == (30, 10)
    assert sorted([*x[:, 0], *held_out[:, 0]]) == sorted(values)
    assert data.spec is not None
    assert data.spec.input_mean is not None
    assert data.spec.input_std is not None
    assert data.spec.input_mean[0] == pytest.approx(x[:, 0].astype(float).mean(), rel=1e-12)
    assert data.spec.input_std[0] == pytest.approx(x[:, 0].astype(float).std(), rel=1e-12)
    assert (x[:, 1:].sum(axis=1) == 1).all()
    # Each row has a category of its own, so the training rows lack those of the held-out rows.
    assert not held_out[:, 1:].any()
    assert x.shape[1] == 1 + 30


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "2.5", " 3 ", "-4e2"], [1, 2.5, 3, -400]),
        (["true", "False", "TRUE", "false"], [1, 0, 1, 0]),
        (["1", "1", "1", "1"], [1, 1, 1, 1]),
        (["9007199254740993", "1", "2", "3"], [9007199254740992, 1, 2, 3]),
        (["99999999999999999999", "1", "2", "3"], [1e20, 1, 2, 3]),
    ],
)
def test_numbers_and_flags(tmp_path: Path, values: list[str], expected: list[float]) -> None:
    data = loaded(f"{csv(tmp_path, column('n', values))},target=y")
    x = rows_of(data.train)[0]
    assert x[:, 0].tolist() == np.array(expected, np.float32).tolist()
    assert data.spec is not None
    constant = len(set(expected)) == 1
    assert (data.spec.input_std == (1.0,)) == constant


@pytest.mark.parametrize(
    ("values", "options", "classes"),
    [
        (["x", "y", "x", "y"], "", ("x", "y")),
        (["true", "false", "true", "true"], "", ("false", "true")),
        (["10", "9", "10", "-1", "9", "-1"], "", ("-1", "9", "10")),
        # There are as many values as rows.
        (["1", "2", "3", "4"], "", None),
        ([*range(21)] * 3, "", None),
        ([*range(21)] * 3, ",task=classification", tuple(map(str, range(21)))),
        (["0.5", "1.5", "0.5", "1.5"], "", None),
        (["0.5", "1.5", "0.5", "1.5"], ",task=classification", ("0.5", "1.5")),
        (["0", "1", "0", "1"], ",task=regression", None),
        (["9007199254740993", "1"] * 2, ",task=regression", None),
    ],
)
def test_targets(tmp_path: Path, values: Any, options: str, classes: Any) -> None:
    text = "n,t\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values))
    data = loaded(f"{csv(tmp_path, text)},target=t{options}")
    y = rows_of(data.train)[1]
    assert data.spec is not None
    assert data.spec.class_names == classes
    if classes is None:
        assert (data.spec.task, data.spec.outputs) == ("regression", 1)
        assert (y.dtype, y.tolist()) == ("float32", [[float(v)] for v in values])
    else:
        assert (data.spec.task, data.spec.outputs) == ("classification", len(classes))
        assert [classes[label] for label in y] == [str(v) for v in values]


def test_a_split_does_not_change_the_classes(tmp_path: Path) -> None:
    """A class is known even if the training part has no row of it."""
    text = column("n", range(40), y="aaaaaaaaaaaaaaaaaaab")
    parts = [loaded(f"{csv(tmp_path, text)},target=y", f) for f in (0.0, 0.95)]
    assert [p.spec.class_names for p in parts if p.spec] == [("a", "b"), ("a", "b")]
    assert set(rows_of(parts[1].train)[1]) == {0}


def test_weights_and_dropped_columns(tmp_path: Path) -> None:
    text = "n,w,id,y\n1,0.5,x,a\n2,2,y,b\n3,0,z,a\n4,1,q,b\n"
    x, y, weight = rows_of(loaded(f"{csv(tmp_path, text)},target=y,weight=w,drop=id").train)
    assert (x.tolist(), y.tolist()) == ([[1], [2], [3], [4]], [0, 1, 0, 1])
    assert (weight.tolist(), weight.dtype) == ([0.5, 2, 0, 1], "float32")


def test_missing_values_become_the_mean_of_the_training_rows(tmp_path: Path) -> None:
    train = csv(tmp_path, "n,c,y\n1,u,a\n,v,b\n5,,a\nNaN,u,b\n")
    test = csv(tmp_path, "n,c,y\n,,a\n100,w,b\n", "test.csv")
    data = loaded(f"{train},target=y,missing=mean,test={test}")
    assert rows_of(data.train)[0].tolist() == [[1, 1, 0], [3, 0, 1], [5, 0, 0], [3, 1, 0]]
    assert rows_of(data.test)[0].tolist() == [[3, 0, 0], [100, 0, 0]]
    assert data.spec is not None
    assert (data.spec.input_mean, data.spec.input_std) == ((3, 0, 0), (2, 1, 1))


def test_several_files_are_one_table(tmp_path: Path) -> None:
    """Columns are matched by name, and the kind of a column fits all files."""
    csv(tmp_path, "n,m,y\n1,5,a\n2,6,b\n", "1.csv")
    csv(tmp_path, "y,m,n\na,x,1.5\nb,7,\n", "2.csv")
    csv(tmp_path, "n,m,y\n", "3.csv")  # without rows
    (tmp_path / "4.csv.gz").write_bytes(gzip.compress(b"n,m,y\n4,5,a\n"))
    for pattern in (tmp_path, f"{tmp_path}/*.csv*"):
        data = loaded(f"{pattern},target=y,missing=mean")
        x, y = rows_of(data.train)
        assert data.features == ("n", "m=5", "m=6", "m=7", "m=x")
        assert x[:, 0].tolist() == [1, 2, 1.5, 2.125, 4]
        assert x[:, 1:].argmax(axis=1).tolist() == [0, 1, 3, 2, 0]
        assert y.tolist() == [0, 1, 0, 1, 0]


def test_the_validation_part_may_have_its_own_file(tmp_path: Path) -> None:
    train = csv(tmp_path)
    val = csv(tmp_path, "y,n,color\nb,1.5,black\n", "val.csv")
    data = loaded(f"{train},target=y,validation={val}", 0.5)
    assert (len(data.train), data.test) == (4, None)
    assert [part.tolist() for part in rows_of(data.validation)] == [[[1.5, 0, 0, 0]], [1]]


def test_parquet_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "i": pa.array([1, 2, None, 4], pa.int8()),
            "large": pa.array([2**60 + 1, 1, 1, 1]),
            "f": pa.array([0.5, 1.5, 2.5, 3.5], pa.float16()),
            "b": [True, False, True, True],
            "s": pa.array(["007", "8", "8", None], pa.large_string()),
            "d": pa.array(["u", "v", "u", "v"]).dictionary_encode(),
            "y": pa.array([0, 1, 0, 1], pa.uint64()),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    data = fitted(tables.load_parquet(f"{tmp_path},target=y,missing=mean", 0))
    x, y = rows_of(data.train)
    assert data.features == ("i", "large", "f", "b", "s=007", "s=8", "d=u", "d=v")
    assert x[0, 1] == 2.0**60
    assert x[2].tolist() == [pytest.approx(7 / 3), 1, 2.5, 1, 0, 1, 1, 0]
    assert (x[3, 4:6].tolist(), y.tolist()) == ([0, 0], [0, 1, 0, 1])
    assert data.spec is not None
    assert data.spec.class_names == ("0", "1")


def test_numbers_in_a_column_of_flags(tmp_path: Path) -> None:
    """0 and 1 count as flags; any other number is an error."""
    for name, flags in (("train", [True, False]), ("validation", [1, 0]), ("test", [0, 7])):
        parquet.write_table(pa.table({"flag": flags, "y": [0, 1]}), tmp_path / f"{name}.parquet")
    options = f"{tmp_path}/train.parquet,validation={tmp_path}/validation.parquet,target=y"
    data = fitted(tables.load_parquet(options, 0))
    assert rows_of(data.validation)[0].shape[0] == 2
    with pytest.raises(
        DataError, match=r"'flag' is 7 in row 2 .*true or false in the training part"
    ):
        fitted(tables.load_parquet(f"{options},test={tmp_path}/test.parquet", 0))


def test_an_unsupported_parquet_type_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"when": [datetime(2020, 1, 1)] * 4, "n": [1, 2, 3, 4], "y": list("abab")})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"'when' of .*t.parquet is of type timestamp.*drop=when"):
        tables.load_parquet(f"{tmp_path}/t.parquet,target=y", 0)
    assert fitted(tables.load_parquet(f"{tmp_path},target=y,drop=when", 0)).features == ("n",)


def damaged_parquet(folder: Path, groups: Sequence[int], name: str = "t.parquet") -> str:
    """Writes 40 rows in row groups of 10, of which some have a byte flipped in a page."""
    table = pa.table({"n": np.arange(40.0), "s": list("uv" * 20), "y": list("aabb" * 10)})
    parquet.write_table(table, folder / name, row_group_size=10, write_page_checksum=True)
    content = bytearray((folder / name).read_bytes())
    metadata = parquet.ParquetFile(folder / name).metadata
    for group in groups:
        chunk = metadata.row_group(group).column(0)
        content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 4
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_a_damaged_row_group_is_an_error(tmp_path: Path) -> None:
    path = damaged_parquet(tmp_path, [1])
    message = r"t.parquet cannot be read: .*CRC checksum verification failed.* Repair or remove it"
    with pytest.raises(DataError, match=message):
        prepared_from(f"{path},target=y", 40, "parquet")


def test_invalid_utf8_in_a_parquet_file_is_an_error(tmp_path: Path) -> None:
    """Without a page checksum, pyarrow reads such bytes without an error."""
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"s": ["word"], "y": ["a"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"word", b"w\xffrd"))
    with pytest.raises(DataError, match=r"t.parquet cannot be read: .*Invalid UTF8 sequence"):
        prepared_from(f"{path},target=y", 4, "parquet")


@pytest.mark.parametrize("content", [b"no table at all", b"", None])
@pytest.mark.parametrize("most", [0, 100])
def test_a_parquet_file_without_a_footer_is_an_error(
    tmp_path: Path, content: bytes | None, most: int
) -> None:
    """A file that is cut off has no footer either, because the footer is its end."""
    path = Path(damaged_parquet(tmp_path, []))
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    message = r"t.parquet cannot be read: .* Repair or remove it"
    with pytest.raises(DataError, match=message):
        prepared_from(f"{path},target=y", most, "parquet")


def test_a_contradictory_parquet_footer_is_an_error(tmp_path: Path) -> None:
    class Group:
        num_rows = 3

    class Footer:
        num_rows, num_row_groups = 7, 2

        def row_group(self, group: int) -> Group:
            return Group()

    with pytest.raises(ValueError, match="its row groups have 6 rows, but its footer says 7"):
        parquet_tables.check_footer(Footer())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + '1,"red,a\n2,blue,b\n3,red,a\n', "in line 2 is not closed"),
        (HEADER + '1,red,a\n2,blue,"b\n3,red,a', "in line 3 is not closed"),
        (HEADER + '1,red,"a\n2,blue,b\n3,"red",a\n', "in line 2 is closed only in line 4"),
        (HEADER + '1,red,a\n\n2\n3,"red,a\n4,red,a\n', "in line 5 is not closed"),
        (HEADER + '1,red,a\n2,"b""\n3,red,a\n', "in line 3 is not closed"),
        ('n,"color,y\n1,red,a\n2,blue,b\n', "in line 1 is not closed"),
        ('n,"y\n1,"a\n2,b\n', "in line 1 is closed only in line 2"),
    ],
)
@pytest.mark.parametrize("most", [0, 9])
def test_an_unclosed_quote_is_an_error(tmp_path: Path, text: str, message: str, most: int) -> None:
    """The value then contains all following lines, so the rows cannot be separated."""
    message = f"t.csv cannot be read: the quote that begins a value {message}.* Repair"
    with pytest.raises(DataError, match=message):
        prepared_from(f"{csv(tmp_path, text)},target=y", most)


def test_closed_quotes_are_read(tmp_path: Path) -> None:
    """Quotes may span lines, be doubled, follow a byte order mark, or stand inside a value."""
    rows = '"1" ,"red\n\n""light"" ",a\n2,5" pipe,"b"\r\n3,"5"" ,\n6"" pipe",a\n4,"4"th,"b"'
    path = csv(tmp_path, '\ufeff"n,",color,y\n' + rows)
    data = tables.load_csv(f"{path},target=y", 0)
    x, _ = rows_of(data.train)
    assert x["n,"].tolist() == [1, 2, 3, 4]
    assert x["color"].tolist() == ['red\n\n"light"', '5" pipe', '5" ,\n6" pipe', "4th"]


def test_an_error_that_bad_rows_cause_names_them(tmp_path: Path) -> None:
    """Without the bad rows the target has only one class."""
    path = csv(tmp_path, "n,y\n1,a\n2,a\n3\n4\n")
    message = (
        r"--dataset csv:.* target 'y' .* 2 rows cannot be read; the first is row 3 of .*t.csv: "
    )
    with pytest.raises(DataError, match=message):
        prepared_from(f"{path},target=y", 2)


def test_a_missing_pyarrow_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    path = csv(tmp_path)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"Install it: pip install 'tfmulti\[tables\]'"):
        tables.load_csv(f"{path},target=y", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs the column to predict: target=COLUMN. Known: n, color, y"),
        (",target=colour", "target=colour: no such column; did you mean 'color'"),
        (",target=y,weight=m", "weight=m: no such column"),
        (",target=y,drop=n+colr", "drop=colr: no such column; did you mean 'color'"),
        (",target=y,drop=y", "column 'y' is given for target and drop. Give it once"),
        (",target=y,weight=y", "column 'y' is given for target and weight"),
        (",target=y,drop=n+color", "no column is left to predict from"),
        (",targt=y", "no option 'targt'; did you mean 'target'"),
        (",target=", "target has no value"),
        (",target=y,task=clasification", "task is .*did you mean 'classification'"),
        (",target=y,missing=median", "missing is 'median'; .*Known: mean"),
        (",target=color,task=regression", "needs numbers, but the target 'color' is 'blue'"),
        (",target=color,drop=y+y", "column 'y' is given for drop and drop"),
        (",target=n,task=classification", "'n' has 4 classes in 4 rows.*or task=regression"),
        (",target=y,weight=color", "the weights 'color' are text"),
        (",target=y,test=none.csv", "no file none.csv"),
    ],
)
def test_mistakes_in_options(tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=f"--dataset csv:.*{message}"):
        loaded(csv(tmp_path) + options)


RAGGED = "n,color,y\n1,red,a\n\n2\n2,blue,b\n3,red,b,9\n4,blue,a\n5,x\n"


def prepared_from(options: str, skip_bad_records: int = 0, form: str = "csv") -> DataSet:
    config = FitConfig(
        dataset=f"{form}:{options}", skip_bad_records=skip_bad_records, validation_fraction=0.0
    )
    data = load_data(config)
    assert data is not None
    return data


def test_rows_with_a_wrong_number_of_columns_are_left_out(tmp_path: Path) -> None:
    """The limit holds for all parts together, and each row is named. Empty lines are no rows."""
    ragged, test = csv(tmp_path, RAGGED), csv(tmp_path, SMALL + "5,red\n", "test.csv")
    other = csv(tmp_path, SMALL, "validation.csv")
    data = prepared_from(f"{ragged},target=y,test={test},validation={other}", 4)
    assert data.lost == (
        f"row 2 of {ragged}: it has 1 column, but the header has 3: '2'.",
        f"row 4 of {ragged}: it has 4 columns, but the header has 3: '3,red,b,9'.",
        f"row 6 of {ragged}: it has 2 columns, but the header has 3: '5,x'.",
        f"row 5 of {test}: it has 2 columns, but the header has 3: '5,red'.",
    )
    x, y = rows_of(data.train)
    assert data.features == ("n", "color=blue", "color=red")
    assert x.tolist() == [[1, 0, 1], [2, 1, 0], [4, 1, 0]]
    assert y.tolist() == [0, 1, 0]
    assert (len(data.validation), len(data.test)) == (4, 4)


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (
            0,
            "row 2 of {}: it has 1 column, .* '2'. Repair or remove it, or give --skip_bad_",
        ),
        (2, "3 examples cannot be read, more than --skip_bad_records 2 allows; the first is row 2"),
    ],
)
def test_too_many_bad_rows_are_an_error(tmp_path: Path, most: int, message: str) -> None:
    ragged = csv(tmp_path, RAGGED)
    with pytest.raises(DataError, match="^" + message.format(ragged)):
        prepared_from(f"{ragged},target=y", most)


def test_rows_that_are_left_out_count_in_row_numbers(tmp_path: Path) -> None:
    csv(tmp_path, RAGGED, "1.csv")
    for cell, message in ((",red,a", "'n' has no value"), ("inf,red,a", "'n' is inf")):
        csv(tmp_path, f"n,color,y\n1\n1,red,a\n3,\n{cell}\n5,red\n", "2.csv")
        with pytest.raises(DataError, match=rf"{message} in row 4 of .*2\.csv"):
            loaded(f"{tmp_path},target=y", most_bad=9)
    train = csv(tmp_path, SMALL)
    other = csv(tmp_path, "n,color,y\n1\nx,red,a\n", "2.csv")
    with pytest.raises(DataError, match=r"'n' is 'x' in row 2 of .*2\.csv"):
        loaded(f"{train},target=y,test={other}", most_bad=9)


def test_a_long_row_is_shortened_in_messages(tmp_path: Path) -> None:
    # So many rows fill several blocks of pyarrow.
    rows = "".join(f"{i},a\n" for i in range(300_000))
    text = f'n,y\n1\n{rows}"2\n3",b,{"x" * 99}\n4,b\n'
    first, last = prepared_from(f"{csv(tmp_path, text)},target=y", 2).lost
    assert first.startswith("row 1 of ")
    assert "row 300002 of" in last
    assert last.endswith(f"3 columns, but the header has 2: '\"2\\n3\",b,{'x' * 32}…'.")


def test_a_file_with_too_many_bad_rows_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_tables, "_MOST_BAD", 2)
    path = csv(tmp_path, "n,y\n" + "1,a,\n" * 3)
    with pytest.raises(DataError, match=r"t.csv cannot be read: .*Row #4: Expected 2 columns"):
        prepared_from(f"{path},target=y", 9)


def test_a_gzip_file_of_several_members(tmp_path: Path) -> None:
    text = column("n", range(99))
    content = gzip.compress(text[:199].encode()) + bytes(9) + gzip.compress(text[199:].encode())
    table, bad = csv_tables.read_csv(content, is_gzip=True)
    assert (table.num_rows, bad) == (99, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Empty CSV file"),
        (b"n,y\n1,a\n", r"its GZIP data is damaged \(.*incorrect header check\)"),
        (gzip.compress(b"n,y\n1,a\n2,b\n")[:-8] + bytes(8), "its GZIP data is damaged"),
        (gzip.compress(b"n,y\n1,a\n2,b\n")[:-3], "the GZIP file is cut off"),
    ],
    ids=["empty", "not GZIP", "wrong checksum", "cut off"],
)
def test_a_damaged_gzip_file_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(content)
    for most in (0, 9):
        pattern = rf"^--dataset csv:{path}: {path} .*{message}.*\. Repair"
        with pytest.raises(DataError, match=pattern):
            prepared_from(f"{path},target=y", most)


MANY = column("c", [f"c{i}" for i in range(101)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv cannot be read: Empty CSV file. Repair or remove it"),
        ("n,y\n", "t.csv has no rows"),
        (
            "n,y\n1,a,\n",
            "no rows that can be read: row 1 of .*t.csv: it has 3 columns, .* '1,a,'. ",
        ),
        ("n,n,y\n1,2,a\n", "has the column 'n' twice"),
        ("n,y\n1,a\n,b\n", "'n' has no value in row 2 of .*missing=mean or drop=n"),
        ("c,y\nu,a\nv,b\n,b\n", "'c' has no value in row 3 of .*t.csv"),
        ("n,y\n1,a\n2,\n", "'y' has no value in row 2 of .*t.csv. Remove such rows"),
        ("n,y\n,a\n,b\n", "'n' has no values. Leave it out: drop=n"),
        ("n,y\n1,a\n-inf,b\n", "'n' is -inf in row 2 of .*t.csv, which is not a finite"),
        ("n,y\n1,a\n1e39,b\n", r"'n' is 1e\+39 in row 2 of .*t.csv, which is not a finite"),
        ("n,y\n1,1.5\n2,inf\n", "'y' is inf in row 2 of .*t.csv, which is not a finite"),
        ("n,y\n1,a\n2,a\n", "'y' has 1 classes in 2 rows, but it needs two or more"),
        ("n,y\n1,a\n2,b\n3,c\n", "'y' has 3 classes in 3 rows, .*Use another target.$"),
        (MANY, "'c' has 101 different texts, such as 'c0' .*drop=c"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"--dataset csv:.*{message}"):
        loaded(f"{csv(tmp_path, text)},target=y")


@pytest.mark.parametrize("data", [b"\xff\xfea,b\n1,2\n", "n,y\n1,a\n".encode("utf-16")])
def test_a_file_that_is_not_utf8_is_an_error(
    tmp_path: Path, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    for most in (0, 9):
        with pytest.raises(DataError, match=r"t.csv cannot be read: .*not UTF-8 text"):
            prepared_from(f"{tmp_path}/t.csv,target=y", most)
    assert not capfd.readouterr().err


def test_rows_that_are_not_utf8_are_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [b"1,red,a", b"\xff", b"2,\xe4\xe4h,b", b"3", b"NA,\xef\xb7\x90,b", b"5,blue,\xfc"]
    path = tmp_path / "t.csv"
    path.write_bytes(b"\n".join([b"n,color,y", *rows, b"6,red,b"]))
    data = prepared_from(f"{path},target=y,missing=mean", 4)
    assert list(data.lost) == [
        f"row 2 of {path}: it has 1 column, but the header has 3: '\N{REPLACEMENT CHARACTER}'.",
        f"row 3 of {path}: it is not UTF-8 text: '2,\N{REPLACEMENT CHARACTER}h,b'.",
        f"row 4 of {path}: it has 1 column, but the header has 3: '3'.",
        f"row 6 of {path}: it is not UTF-8 text: '5,blue,\N{REPLACEMENT CHARACTER}'.",
    ]
    assert rows_of(data.train)[1].tolist() == [0, 1, 1]
    with pytest.raises(DataError, match=r"^row 2 of .* or give --skip_bad_records N"):
        prepared_from(f"{path},target=y,missing=mean")
    monkeypatch.setattr(csv_tables, "_MOST_BAD", 1)
    path.write_bytes(b"n,y\n1,\xff\n1,\xff\n")
    with pytest.raises(DataError, match=r"t.csv cannot be read: it is not UTF-8 text. Repair"):
        prepared_from(f"{path},target=y", 9)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n,y\n1,a\n", "2.csv lacks the column 'color'; it has n, y"),
        ("n,color,y,z\n1,red,a,1\n", "2.csv has a column 'z', which the first file"),
        ("n,color,y\n1,red,a\n2,red,c\n", "'y' is 'c' in row 2 of .*2.csv, which no training"),
        ("n,color,y\n1,red,a\nx,red,b\n", "'n' is 'x' in row 2 of .*2.csv, but it is a number"),
        ("n,color,y\n1,red,a\n,red,b\n", "'n' has no value in row 2 of .*2.csv"),
        ("n,color,y\n1,red,a\n2,red,\n", "'y' has no value in row 2 of .*2.csv"),
    ],
)
def test_mistakes_in_another_part(tmp_path: Path, text: str, message: str) -> None:
    other = csv(tmp_path, text, "2.csv")
    with pytest.raises(DataError, match=message):
        loaded(f"{csv(tmp_path)},target=y,test={other}")


def test_a_flag_column_has_flags_in_all_parts(tmp_path: Path) -> None:
    train = csv(tmp_path, column("f", ["true", "false"]))
    other = csv(tmp_path, column("f", ["true", "1", "false"]), "2.csv")
    with pytest.raises(DataError, match=r"'f' is '1' in row 2 of .*, but it is true or false in"):
        loaded(f"{train},target=y,validation={other}")


def test_rows_are_numbered_within_their_file(tmp_path: Path) -> None:
    csv(tmp_path, "n,y\n1,a\n2,b\n3,a\n", "1.csv")
    for text, row in (("n,y\n1,a\n,b\n", 2), ("n,y\n,b\n", 1)):
        csv(tmp_path, text, "2.csv")
        with pytest.raises(DataError, match=rf"in row {row} of .*2.csv"):
            loaded(f"{tmp_path},target=y")


def test_a_column_without_training_values_is_an_error(tmp_path: Path) -> None:
    """All values of the column are in the validation part."""
    for kind, value in (("n", "1"), ("c", "x")):
        text = csv(tmp_path, column(kind, [value, *[""] * 39]))
        with pytest.raises(DataError, match=f"'{kind}' has no values in the training rows"):
            loaded(f"{text},target=y,missing=mean", 0.95)


def test_a_negative_weight_is_an_error(tmp_path: Path) -> None:
    text = csv(tmp_path, "n,w,y\n1,1,a\n2,-0.5,b\n")
    with pytest.raises(DataError, match=r"weight 'w' is -0.5 in row 2 of .*t.csv"):
        loaded(f"{text},target=y,weight=w")


def test_a_file_in_two_parts_is_an_error(tmp_path: Path) -> None:
    path = csv(tmp_path)
    with pytest.raises(DataError, match=r"t.csv is in the training part and in the test part"):
        loaded(f"{tmp_path}/*.csv,target=y,test={path}")


def test_no_path() -> None:
    with pytest.raises(DataError, match=r"--dataset csv: needs a file. Write --dataset csv:PATH"):
        tables.load_csv("", 0)


def test_an_unreadable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = csv(tmp_path)

    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    # Root may read any file, so the refusal is simulated.
    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(DataError, match=r"t.csv cannot be read: Permission denied"):
        tables.load_csv(f"{path},target=y", 0)
