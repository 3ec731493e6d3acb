"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, by the loaders and in the cache of Keras.

Each loader raises DataError if its data set is not in the cache and cannot be downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, labelled, with_channels
from tfmulti.errors import DataError

_GOOGLE = "storage.googleapis.com"
_FASHION = ",".join(
    f"{part}-{kind}.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
_TORONTO = "www.cs.toronto.edu"


def mnist(options: str, seed: int) -> DataSet:
    """Returns 60,000 training and 10,000 test digits, uint8 [28, 28, 1]."""
    return _load("mnist", "mnist.npz", f"https://{_GOOGLE}/tensorflow/tf-keras-datasets/mnist.npz")


def fashion_mnist(options: str, seed: int) -> DataSet:
    """Returns 60,000 training and 10,000 test pieces of clothing, uint8 [28, 28, 1]."""
    folder = f"https://{_GOOGLE}/tensorflow/tf-keras-datasets/"
    return _load(
        "fashion_mnist", "fashion-mnist/train-images-idx3-ubyte.gz", f"{folder}{{{_FASHION}}}"
    )


def cifar10(options: str, seed: int) -> DataSet:
    """Returns 50,000 training and 10,000 test photographs of 10 classes, uint8 [32, 32, 3]."""
    url = f"https://{_TORONTO}/~kriz/cifar-10-python.tar.gz"
    return _load("cifar10", "cifar-10-batches-py-target_archive", url)


def cifar100(options: str, seed: int) -> DataSet:
    """Returns 50,000 training and 10,000 test photographs of 100 classes, uint8 [32, 32, 3]."""
    url = f"https://{_TORONTO}/~kriz/cifar-100-python.tar.gz"
    return _load("cifar100", "cifar-100-python-target_archive", url)


def _load(name: str, cached_as: str, url: str) -> DataSet:
    """Returns the data set of a name in `keras.datasets`.

    `cached_as` is its file or folder in the cache, and `url` is where Keras downloads it from.

    Raises:
        DataError: it is not in the cache and cannot be downloaded.
    """
    cached = keras_cache() / cached_as
    if not cached.exists():
        _check_network(name, cached, url)
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
    # The workers of a machine start at the same time, and only one of them may download.
    with _file_lock(keras_cache() / ".tfmulti.lock"):
        loader = importlib.import_module("keras.datasets")
        try:
            (x, y), (x_test, y_test) = getattr(loader, name).load_data()
        except Exception as error:
            # Keras raises a bare Exception if a download fails.
            raise DataError(_no_download_message(name, cached, url, str(error))) from None
    x, x_test = with_channels(x), with_channels(x_test)
    return DataSet(
        train=labelled(x, y),
        test=labelled(x_test, y_test),
        spec=DataSpec(x.shape[1:], "uint8", CLASSIFICATION, int(y.max()) + 1, 1 / 255),
    )


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Holds a file lock, so that one process at a time runs the block."""
    try:
        lock = open(path, "w")  # noqa: SIM115
    except OSError:
        # This process cannot write to the folder, so it needs no lock.
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keras_cache() -> Path:
    """Returns the folder in which Keras keeps the data sets that it has downloaded."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return Path(home).expanduser() / "datasets"


def _check_network(name: str, cached: Path, url: str) -> None:
    """Raises DataError at once if there is no network, before any slow import."""
    if any(key.lower().endswith("_proxy") for key in os.environ):
        # The proxy resolves names, and Keras' loader will report its errors.
        return
    failures: list[OSError] = []
    host = url.split("/")[2]

    def resolve() -> None:
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    # No answer within this time is no failure, and Keras' loader will report a later one.
    thread.join(timeout=0.2)
    if failures:
        raise DataError(_no_download_message(name, cached, url, f"{host}: {failures[0].strerror}"))


def _no_download_message(name: str, cached: Path, url: str, reason: str) -> str:
    """Returns the message that says which file to fetch elsewhere and where to put it."""
    step = f"put the files into {cached.parent}" if "{" in url else f"put it at {cached}"
    return (
        f"--dataset {name} is not in Keras' cache and cannot be downloaded ({reason}). "
        f"Fetch {url} elsewhere and {step}."
    )
