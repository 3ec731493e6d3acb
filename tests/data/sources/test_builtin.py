"""Tests the built-in data sets and arrays in files, and the errors for wrong files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmulti.data.arrays import ArraySource
from tfmulti.data.options import parse_options
from tfmulti.data.sources import digits, keras_datasets, npy, npz, regression, synthetic
from tfmulti.errors import ConfigError, DataError

X = np.arange(20 * 6, dtype=np.float32).reshape(20, 6)
Y = np.arange(20) % 4


def test_digits_are_complete() -> None:
    data = digits.load("", 0)
    assert [len(p) for p in (data.train, data.validation, data.test)] == [1197, 300, 300]
    x = np.concatenate([p.data[0] for p in (data.train, data.validation, data.test)])
    y = np.concatenate([p.data[1] for p in (data.train, data.validation, data.test)])
    assert x.shape == (1797, 8, 8, 1)
    assert (x.min(), x.max()) == (0, 16)
    # The class counts that UCI's documentation gives for these 1,797 images.
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_do_not_depend_on_the_seed() -> None:
    first, second = digits.load("", 0), digits.load("", 1)
    assert np.array_equal(first.train.data[0], second.train.data[0])


def test_regression_data_has_its_shape_and_type() -> None:
    x, y = regression.load("", 0).train.data
    assert (x.shape, y.shape, x.dtype) == ((100, 10), (100, 1), np.float32)
    assert abs(float(x.mean())) < 0.1


def test_synthetic_data_has_a_seed_and_a_shape() -> None:
    data = synthetic.load("shape=5x4x3,classes=7,examples=40", 3)
    x, y = data.train.data
    assert (x.shape, len(data.validation)) == ((40, 5, 4, 3), 5)
    assert set(y) <= set(range(7))
    again = synthetic.load("shape=5x4x3,classes=7,examples=40", 3).train.data[0]
    other = synthetic.load("shape=5x4x3,classes=7,examples=40", 4).train.data[0]
    assert np.array_equal(x, again)
    assert not np.array_equal(x, other)


def test_synthetic_tokens() -> None:
    data = synthetic.load("tokens=9,vocabulary=30,classes=2", 0)
    x, _ = data.train.data
    assert data.spec is not None
    assert (data.spec.kind, x.shape[1], x.dtype) == ("tokens", 9, np.int32)
    assert x.min() >= 1
    assert x.max() < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("shap=3", "no option 'shap'; did you mean 'shape'"),
        ("classes=x", "classes is 'x'"),
        ("classes=0", "from 1"),
        ("shape=3x", "shape is '3x'"),
        ("tokens=4,vocabulary=5", "above classes=10"),
    ],
)
def test_synthetic_mistakes(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic.load(options, 0)


def test_a_text_option_takes_any_text() -> None:
    options = parse_options("x", "b=a b=1/*.csv", {"a": "", "b": ""})
    assert options == {"a": "", "b": "a b=1/*.csv"}
    with pytest.raises(ConfigError, match="--dataset x:b=: b has no value"):
        parse_options("x", "b=", {"b": ""})


def test_array_source_reads_rows_in_any_order() -> None:
    source = ArraySource(({"a": X, "b": [X, X]}, Y))
    read = source.read(np.array([3, 0]))
    assert np.array_equal(read[0]["b"][1], X[[3, 0]])
    assert np.array_equal(read[1], Y[[3, 0]])
    assert ArraySource((X.astype(np.float64),)).data[0].dtype == np.float32


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), "x has 20, y has 5 rows"),
        (({"a": X, "b": X[:3]}, Y), r"x\['a'\] has 20, x\['b'\] has 3"),
        ((X[:0], Y[:0]), "no rows"),
        ((3.0, Y), "3.0 is a single value"),
    ],
)
def test_array_source_mistakes(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArraySource(data)


def saved(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def test_npz_classification(tmp_path: Path) -> None:
    images = np.zeros((20, 8, 8), np.uint8)
    data = npz.load(str(saved(tmp_path, x_train=images, y_train=Y, x_test=images, y_test=Y)), 0)
    assert data.spec is not None
    assert data.spec.input_shape == (8, 8, 1)
    assert (data.spec.outputs, data.spec.input_scale) == (4, 1 / 255)
    assert data.validation is None
    assert len(data.test) == 20


def test_npz_regression(tmp_path: Path) -> None:
    data = npz.load(str(saved(tmp_path, x=X, y=X[:, :2])), 0)
    assert data.spec is not None
    assert (data.spec.task, data.spec.outputs) == ("regression", 2)


def test_a_flipped_byte_in_an_npz_file_is_an_error(tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=Y)
    content = bytearray(file.read_bytes())
    content[200] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or truncated \(.*CRC.*\)\. Write"):
        npz.load(str(file), 0)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"a": X}, "", "has the arrays a, but needs 'x' and 'y'"),
        ({"x": X, "y": Y[:7]}, "", "x has 20 rows and y has 7"),
        ({"x": X[:0], "y": Y[:0]}, "", "x has no rows"),
        ({"x": X, "y": np.array(["a"] * 20)}, "", "must be numeric"),
        ({"x": X, "y": np.where(Y == 3, np.nan, 1.0)}, "", "y of the train part is nan in row 3"),
        ({"x": X, "y": np.where(Y == 3, np.nan, 1.0)}, ",classes=4", "y is nan in row 3"),
        ({"x": np.where(X == 7, np.inf, X), "y": Y}, "", "x of the train part is inf in row 1"),
        ({"x": X, "y": np.eye(4, dtype=int)[Y]}, "", r"is one-hot.*y.argmax\(axis=1\)"),
        ({"x": X, "y": Y - 1}, "", "label -1 in row 0 .*out of range 0..2"),
        ({"x": X, "y": Y * 1000}, "", r"label of y is 3000 in row 3, out of range for 20"),
        ({"x": X, "y": Y}, ",classes=3", "label 3 in row 3 .*out of range 0..2"),
        ({"x": X, "y": Y}, ",classs=3", "did you mean 'classes'"),
        ({"x": X, "y": Y / 2}, ",classes=3", "needs whole-number labels"),
        ({"x": X, "y": Y, "x_test": X[:, :3], "y_test": Y}, "", r"shape \(3,\)"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y * 1.0}, "", "test part must be whole"),
    ],
)
def test_npz_mistakes(tmp_path: Path, arrays: Any, options: str, message: str) -> None:
    file = saved(tmp_path, **arrays)
    with pytest.raises((DataError, ConfigError), match=message):
        npz.load(f"{file}{options}", 0)


def test_npz_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a file"):
        npz.load("", 0)
    with pytest.raises(DataError, match="directory"):
        npz.load(str(tmp_path), 0)


def npy_folder(folder: Path, **arrays: Any) -> str:
    for name, array in arrays.items():
        np.save(folder / name, array)
    return str(folder)


def test_npy_is_mapped_and_needs_no_tensorflow(tmp_path: Path) -> None:
    folder = npy_folder(tmp_path, x_train=X, y_train=Y, x_val=X, y_val=Y)
    data = npy.load(folder, 0)
    # There are no arrays in memory, so rows are read when they are needed.
    assert data.train.arrays() is None
    assert isinstance(data.train.data[0].base, np.memmap)
    assert data.train.read(np.array([3]))[1].tolist() == [Y[3]]
    assert len(data.validation) == len(X)
    code = (
        "import sys\nfrom tfmulti.data.sources import npy, npz\nnpy.load(sys.argv[1], 0)\n"
        "npz.load(sys.argv[2], 0)\nsys.exit('tensorflow' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, folder, str(saved(tmp_path, x=X, y=Y))]
    assert subprocess.run(argv).returncode == 0


def test_npy_mistakes(tmp_path: Path) -> None:
    folder = npy_folder(tmp_path, x=X, y=Y, x_tets=X)
    with pytest.raises(DataError, match=r"x_tets.npy has no part in it; did you mean 'x_test'"):
        npy.load(folder, 0)
    with pytest.raises(DataError, match=r"npy: needs a folder. Write --dataset npy:FOLDER"):
        npy.load("", 0)


def test_without_network_and_cache_the_error_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: object) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    with pytest.raises(DataError, match=f"put it at {tmp_path}/datasets/mnist.npz"):
        keras_datasets.mnist("", 0)
