"""Tests `npz:` and `npy:` on this machine and on file systems of TensorFlow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmulti.data.sources import npy, npz
from tfmulti.errors import DataError

pytestmark = pytest.mark.mirrored

X, Y = np.arange(60, dtype=np.float64).reshape(20, 3), np.arange(20) % 4


def put(path: str, content: bytes) -> str:
    if tf.io.gfile.exists(path):
        # TensorFlow appends to an existing file of ram://.
        tf.io.gfile.remove(path)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(content)
    return path


def bytes_by(save: Any, *arrays: np.ndarray, **named: np.ndarray) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


@pytest.fixture(params=["{}", "ram://{}", "file://{}"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Returns a folder of x.npy, y.npy and a.npz."""
    path: str = request.param.format(tmp_path)
    tf.io.gfile.makedirs(path)
    put(f"{path}/x.npy", bytes_by(np.save, X))
    put(f"{path}/y.npy", bytes_by(np.save, Y))
    put(f"{path}/a.npz", bytes_by(np.savez, x=X, y=Y))
    return path


def test_arrays_are_read_from_any_file_system(folder: str) -> None:
    is_remote = "://" in folder
    for data, is_in_memory in (
        (npy.load(folder, 0), is_remote),
        (npz.load(f"{folder}/a.npz,classes=4", 0), True),
    ):
        x, y = data.train.read(np.array([7, 0]))
        assert (x.tolist(), y.tolist()) == (X[[7, 0]].tolist(), [3, 0])
        assert x.dtype == np.float32
        # Local .npy files are mapped. Of arrays in memory, the steps gather the rows.
        assert (data.train.arrays() is not None) == is_in_memory


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty. Write it anew"),
        (b"no archive", "not an .npz file, or a truncated one. Save with"),
        (bytes_by(np.savez, x=X, y=Y)[:-9], "not an .npz file, or a truncated one"),
        (bytes_by(np.savez, x=X, y=np.array([{}] * 20)), "holds pickled Python objects"),
        (bytes_by(np.savez, x=X), "lacks the array 'y'. Add it"),
    ],
)
def test_npz_mistakes(folder: str, content: bytes, message: str) -> None:
    path = put(f"{folder}/bad.npz", content)
    with pytest.raises(DataError, match=f"^--dataset npz:{path}.* ?{message}"):
        npz.load(path, 0)


def test_npy_mistakes(folder: str) -> None:
    for content, message in (
        (bytes_by(np.save, Y)[:-9], "y.npy is damaged or cut off .*Write it anew with np.save"),
        (bytes_by(np.save, np.array([{}])), "y.npy holds Python objects .*np.save"),
        (b"", "y.npy is damaged or cut off"),
        (b"no array", "y.npy is damaged or cut off|y.npy holds Python objects"),
        (bytes_by(np.savez, a=X), r"y.npy is damaged or cut off \(it is an .npz file\)"),
        (bytes_by(np.save, X[:, 0] * np.nan), "y of the train part is nan in row 0"),
    ):
        put(f"{folder}/y.npy", content)
        with pytest.raises(DataError, match=f"^--dataset npy:{folder}: ({message})"):
            npy.load(folder, 0)
    put(f"{folder}/y.npy", bytes_by(np.save, Y))
    put(f"{folder}/x.npy", bytes_by(np.save, np.where(X == 7, np.inf, X)))
    if "://" in folder:
        # The values of a mapped file are not checked, because that would read all of it.
        with pytest.raises(DataError, match="x of the train part is inf in row 2"):
            npy.load(folder, 0)


def test_missing_files_are_errors(folder: str) -> None:
    with pytest.raises(DataError, match=f"npz:{folder}/b.npz: no such file. Give the path"):
        npz.load(f"{folder}/b.npz", 0)
    with pytest.raises(DataError, match=f"npy:{folder}/b: {folder}/b does not exist. Give the"):
        npy.load(f"{folder}/b", 0)
    with pytest.raises(DataError, match=f"{folder}/x.npy is a file. Give the path of a folder"):
        npy.load(f"{folder}/x.npy", 0)
    for load, form in ((npz.load, "npz"), (npy.load, "npy")):
        with pytest.raises(DataError, match=f"^--dataset {form}:nofs://a/b: .*nofs.*Give"):
            load("nofs://a/b", 0)
