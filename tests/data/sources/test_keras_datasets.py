"""Tests Keras' data sets with cached files of their formats, without a network."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import run

pytestmark = pytest.mark.processes


def mnist(cache: Path) -> None:
    images, labels = np.ones((30, 28, 28), np.uint8), np.arange(30) % 10
    np.savez(
        cache / "mnist.npz", x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10]
    )


def fashion_mnist(cache: Path) -> None:
    folder = cache / "fashion-mnist"
    folder.mkdir()
    for part, rows in (("train", 30), ("t10k", 10)):
        labels = (np.arange(rows) % 10).astype(np.uint8).tobytes()
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels))
        images = np.ones((rows, 28, 28), np.uint8).tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images))


def archive(path: Path, folder: str, files: dict[str, dict[bytes, object]]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            data = pickle.dumps(content)
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def batch(rows: int, classes: int, key: bytes) -> dict[bytes, object]:
    return {b"data": np.ones((rows, 3072), np.uint8), key: [i % classes for i in range(rows)]}


def cifar10(cache: Path) -> None:
    files = {f"data_batch_{i}": batch(10000, 10, b"labels") for i in range(1, 6)}
    archive(
        cache / "cifar-10-batches-py-target_archive",
        "cifar-10-batches-py",
        {**files, "test_batch": batch(10000, 10, b"labels")},
    )


def cifar100(cache: Path) -> None:
    archive(
        cache / "cifar-100-python-target_archive",
        "cifar-100-python",
        {"train": batch(500, 100, b"fine_labels"), "test": batch(100, 100, b"fine_labels")},
    )


@pytest.mark.parametrize(
    ("make", "rows", "shape", "classes"),
    [
        (mnist, 30, [28, 28, 1], 10),
        (fashion_mnist, 30, [28, 28, 1], 10),
        (cifar10, 50000, [32, 32, 3], 10),
        (cifar100, 500, [32, 32, 3], 100),
    ],
)
def test_cached_files_are_used(
    tmp_path: Path, make: Callable[[Path], None], rows: int, shape: list[int], classes: int
) -> None:
    cache = tmp_path / "home" / "datasets"
    cache.mkdir(parents=True)
    make(cache)
    # Keras compares the SHA-256 of a file with the original. For this test it accepts any file.
    code = textwrap.dedent(f"""
        import json
        from keras.src.utils import file_utils
        file_utils.validate_file = lambda *args, **options: True
        from tfmulti.data.sources import keras_datasets
        data = keras_datasets.{make.__name__}("", 0)
        print(json.dumps([len(data.train), list(data.spec.input_shape), data.spec.outputs,
                          data.spec.input_scale, str(data.train.data[1].dtype),
                          list(data.train.data[1].shape)]))
    """)
    done = run(
        ["-c", code], tmp_path / "logs", limit_s=120, env={"KERAS_HOME": str(tmp_path / "home")}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        rows,
        shape,
        classes,
        1 / 255,
        "int32",
        [rows],
    ]
