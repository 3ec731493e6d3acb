"""Tests reading texts and their labels, before they become tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.sources.test_folders import make_files
from tests.support.sources import WorkerReplicas
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.loader import Loader
from tfmulti.data.sources import text
from tfmulti.data.transforms.splits import with_validation
from tfmulti.errors import ConfigError, DataError


def read(part: Any) -> tuple[list[str], list[int]]:
    texts, labels = part.read(np.arange(len(part)))
    assert labels.dtype == "int32"
    return texts.tolist(), labels.tolist()


def test_folders(tmp_path: Path) -> None:
    """Each file of `make_files` holds its name."""
    root = make_files(tmp_path, "train/b/1.txt", "train/a/2.txt", "train/a/1.txt", "val/b/3.txt")
    data = text.load(f"{root},tokens=7,vocabulary=30", 0)
    assert read(data.train) == (["train/a/1.txt", "train/a/2.txt", "train/b/1.txt"], [0, 0, 1])
    assert read(data.validation) == (["val/b/3.txt"], [1])
    assert data.test is None
    assert data.train.where(1) == f"{root}/train/a/2.txt"
    assert data.spec is not None
    assert (data.spec.kind, data.spec.input_shape, data.spec.input_dtype) == (
        "tokens",
        (7,),
        "int32",
    )
    assert data.spec.describe() == "7 tokens of 30, 2 classes: a, b"
    unsplit = text.load(f"{root}/train", 0)
    parts = with_validation(unsplit, 1 / 3, 0)
    assert sorted(read(parts.train)[0] + read(parts.validation)[0]) == read(unsplit.train)[0]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables(tmp_path: Path, ending: str) -> None:
    rows = {"t": ["1", "Ü, b\nc", "3"], "n": [1, 2, 3], "y": ["u", "v", "u"]}
    _write(tmp_path / f"a.{ending}", rows)
    _write(tmp_path / f"b.{ending}", {"y": ["v"], "t": ["4"], "n": [4]})
    data = text.load(f"{tmp_path}/a.{ending},text=t,target=y,test={tmp_path}/b.{ending}", 0)
    assert read(data.train) == (rows["t"], [0, 1, 0])
    assert read(data.test) == (["4"], [1])
    assert data.spec is not None
    assert data.spec.class_names == ("u", "v")


def _write(path: Path, rows: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    (csv.write_csv if path.suffix == ".csv" else parquet.write_table)(pa.table(rows), str(path))


def test_an_unreadable_text_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = make_files(tmp_path, "a/1.txt", "a/2.txt", "b/1.txt")
    data = text.load(root, 0)
    for damage, reason in (
        (lambda file: file.write_bytes(b"abc\xff"), r"it is not UTF-8 text \(byte 3\)"),
        (Path.unlink, "No such file or directory"),
    ):
        damage(tmp_path / "a" / "2.txt")
        reader = Loader(data.train, BatchPlan(3, 3), WorkerReplicas(), ReadOptions())
        with pytest.raises(DataError, match=f"{root}/a/2.txt: {reason}"):
            next(reader.batches())


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    root = make_files(tmp_path, "a/1.txt", "b/1.txt")
    (tmp_path / "a" / "1.txt").write_bytes(b"\xef\xbb\xbfword")
    assert read(text.load(root, 0).train)[0][0] == "word"


TABLE = "t,y\nx,u\nz,v\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "has one class folder"),
        (",tokens=0", "tokens is '0'"),
        (",token=2", "no option 'token'; did you mean 'tokens'"),
        (",vocabulary=2", "vocabulary is 2, but it must be above 2: 0 is padding"),
        (",test=a", "test=a is for tables. Put the class folders of that part into .*/test"),
        ("/t.csv", "needs text=COLUMN. Known: t, y"),
        ("/t.csv,text=t", "needs target=COLUMN"),
        ("/t.csv,text=x,target=y", "text=x: no such column; known: t, y"),
        ("/t.csv,text=t,target=why", "target=why: no such column"),
        ("/one.csv,text=t,target=y", "'y' has 1 classes in 2 rows"),
        ("/gap.csv,text=t,target=y", "'t' has no value in row 2 of .*/gap.csv"),
        ("/t.csv,text=t,target=y,test=none.csv", "no file none.csv"),
        ("/t.csv,text=t,target=y,test=ROOT/t.csv", "t.csv is in the training part and in the test"),
        ("/none", "none does not exist. Give the path of a folder"),
    ],
)
def test_mistakes(tmp_path: Path, options: str, message: str) -> None:
    root = make_files(tmp_path, "a/1.txt")
    for name, table in (("t", TABLE), ("one", "t,y\nx,u\nz,u\n"), ("gap", "t,y\nx,u\n,v\n")):
        (tmp_path / f"{name}.csv").write_text(table)
    with pytest.raises((ConfigError, DataError), match=f"--dataset text:.*{message}"):
        text.load(root + options.replace("ROOT", root), 0)


def test_rows_of_tables_that_are_left_out(tmp_path: Path) -> None:
    for name, rows in (("t", "lost\n"), ("test", "u,v,w\n")):
        (tmp_path / f"{name}.csv").write_text(TABLE + rows)
    options = f"{tmp_path}/t.csv,text=t,target=y,test={tmp_path}/test.csv"
    data = text.load(options, 0)
    assert [lost.split(":")[0] for lost in data.lost] == [
        f"row 3 of {tmp_path}/t.csv",
        f"row 3 of {tmp_path}/test.csv",
    ]
    assert [len(data.train), len(data.test)] == [2, 2]


def test_a_missing_path_is_an_error() -> None:
    with pytest.raises(DataError, match=r"--dataset text: needs a folder. Write"):
        text.load("", 0)
