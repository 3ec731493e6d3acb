"""Tests tables in file systems that TensorFlow reads."""

from __future__ import annotations

import pytest

from tfmulti.data.data_set import fitted
from tfmulti.data.io import files
from tfmulti.data.sources import tables

pytestmark = pytest.mark.mirrored


def test_tables_on_a_file_system_of_tensorflow() -> None:
    """`ram://` is used in place of stores such as `gs://`, because TensorFlow reads both."""
    gfile = files.gfile()
    gfile.makedirs("ram://tables/in")
    for name, rows in (("1", "1,a\n2,b\n"), ("2", "3,a\n")):
        with gfile.GFile(f"ram://tables/in/{name}.csv", "w") as file:
            file.write("n,y\n" + rows)
    for pattern in ("ram://tables/in", "ram://tables/in/*.csv"):
        data = fitted(tables.load_csv(f"{pattern},target=y", 0))
        assert data.train.data[0].tolist() == [[1], [2], [3]]
    with pytest.raises(OSError, match="no such file"):
        files.read_bytes("ram://tables/none")
