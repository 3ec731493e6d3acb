"""Replaces the downloads of public programs by synthetic data, and shortens data."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, STEPS = 40, 16, 2
FORMS = {
    "mnist": ((28, 28), 10),
    "fashion_mnist": ((28, 28), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}
# Modules that programs use for plots or after training, and that do not affect its numbers.
SHOWING = (
    "imageio",
    "sklearn",
    "sklearn.metrics",
    "tensorflow_docs",
    "tensorflow_docs.vis",
    "tensorflow_docs.vis.embed",
    "tensorflow_probability",
    "torch",
    "torch.utils",
    "torch.utils.data",
    "tqdm",
)


def install(folder: Path) -> None:
    """Replaces downloads by synthetic data in this process. Files are written to `folder`."""
    for name, (shape, classes) in FORMS.items():
        module = getattr(keras.datasets, name)
        module.load_data = _images(shape, classes, column=name.startswith("cifar"))
    keras.datasets.imdb.load_data = _reviews
    keras.utils.get_file = _get_file(folder)
    keras.utils.plot_model = lambda *args, **options: None
    for name in SHOWING:
        if not _is_installed(name):
            sys.modules[name] = mock.MagicMock()
    if "tqdm" in sys.modules and isinstance(sys.modules["tqdm"], mock.MagicMock):
        sys.modules["tqdm"].tqdm = lambda values, *args, **options: values
    _offer_datasets()
    _without_pretrained_weights()
    _read_text(folder)
    for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        setattr(tf.distribute, name, _current(getattr(tf.distribute, name)))


def _current(original: type) -> type:
    """Returns a class whose instances are the strategy that the program already runs in."""

    class Current(type):
        def __call__(cls, *args: Any, **options: Any) -> tf.distribute.Strategy:
            return tf.distribute.get_strategy()

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Current(original.__name__, (), {})


def cut(data: Any) -> Any:
    """Returns the first rows of arrays, or the first batches of a Dataset."""
    if isinstance(data, tf.data.Dataset):
        return data.take(STEPS)
    if isinstance(data, (np.ndarray, tf.Tensor)):
        return data[:ROWS]
    if isinstance(data, tuple | list):
        return type(data)(cut(part) for part in data)
    if isinstance(data, dict):
        return {name: cut(part) for name, part in data.items()}
    return data


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _images(shape: tuple[int, ...], classes: int, *, column: bool) -> Callable[..., Any]:
    def load_data(*args: Any, **options: Any) -> Any:
        def part(rows: int) -> Any:
            x = np.resize(_rng().integers(0, 256, (500, *shape)).astype("uint8"), (rows, *shape))
            y = (np.arange(rows) % classes).astype("uint8")
            return x, y[:, None] if column else y

        return part(50_000 if column else 60_000), part(10_000)

    return load_data


def _reviews(num_words: int | None = None, **options: Any) -> Any:
    def part(rows: int) -> Any:
        generator = _rng()
        x = [list(generator.integers(1, num_words or 500, 20 + i % 9)) for i in range(rows)]
        return np.array(x, dtype=object), np.arange(rows) % 2

    return part(200), part(100)


def _get_file(folder: Path) -> Callable[..., str]:
    def get_file(fname: Any = None, origin: Any = None, *args: Any, **options: Any) -> str:
        origin = str(origin or fname)
        if "ml-latest-small" in origin:
            target = folder / "ml-latest-small"
            target.mkdir(exist_ok=True)
            generator = _rng()
            rows = [
                f"{generator.integers(1, 20)},{generator.integers(1, 30)},"
                f"{generator.integers(1, 10) / 2},{i}"
                for i in range(400)
            ]
            head = "userId,movieId,rating,timestamp\n"
            (target / "ratings.csv").write_text(head + "\n".join(rows) + "\n")
            (target / "movies.csv").write_text(
                "movieId,title,genres\n" + "".join(f"{i},Film {i},Drama\n" for i in range(1, 31))
            )
            return str(folder / "ml-latest-small.zip")
        if origin.endswith(".txt"):
            file = folder / Path(origin).name
            file.write_text("The quick brown fox jumps over the lazy dog. " * 200)
            return str(file)
        raise RuntimeError(f"no synthetic data for {origin}")

    return get_file


def _is_installed(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


TFDS_IMAGES = {
    "oxford_flowers102": 102,
    "tf_flowers": 5,
    "cats_vs_dogs": 2,
    "horses_or_humans": 2,
    "mnist": 10,
    "cifar10": 10,
    "stl10": 10,
}


def _offer_datasets() -> None:
    """Offers `tensorflow_datasets.load` of images and labels."""

    def load(name: str, split: Any = None, **options: Any) -> Any:
        known = name.split("/")[0].split(":")[0]
        if known not in TFDS_IMAGES:
            raise RuntimeError(f"no synthetic data for {name} of tensorflow_datasets")
        size = (28, 28, 1) if known == "mnist" else (48, 40, 3)
        x = _rng().integers(0, 256, (96, *size)).astype("uint8")
        y = (np.arange(96) % TFDS_IMAGES[known]).astype("int64")
        supervised = options.get("as_supervised")
        rows = (x, y) if supervised else {"image": x, "label": y}

        def part(_: Any) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(rows)

        splits = {"train": None, "test": None} if split is None else split
        found = (
            {key: part(key) for key in splits}
            if isinstance(splits, dict)
            else [part(key) for key in splits]
            if isinstance(splits, list | tuple)
            else part(splits)
        )
        if not options.get("with_info"):
            return found
        return found, mock.MagicMock(
            splits={key: mock.MagicMock(num_examples=96) for key in ("train", "test")}
        )

    module = sys.modules.get("tensorflow_datasets") or types.ModuleType("tensorflow_datasets")
    module.load = load  # type: ignore[attr-defined]
    module.disable_progress_bar = lambda: None  # type: ignore[attr-defined]
    module.benchmark = lambda *args, **options: None  # type: ignore[attr-defined]
    sys.modules["tensorflow_datasets"] = module


def _without_pretrained_weights() -> None:
    """Makes the models of keras.applications with weights drawn at random."""

    def untrained(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            return original(*args, **{**options, "weights": None})

        return make

    applications = keras.applications
    for owner in [applications, *(getattr(applications, name) for name in dir(applications))]:
        for name in dir(owner):
            thing = getattr(owner, name)
            if name[0].isupper() and callable(thing) and isinstance(owner, types.ModuleType):
                setattr(owner, name, untrained(thing))


def _read_text(folder: Path) -> None:
    """Returns a table of two classes of series for `numpy.loadtxt` of an address."""
    original = np.loadtxt

    def loadtxt(source: Any, *args: Any, **options: Any) -> Any:
        if not str(source).startswith("http"):
            return original(source, *args, **options)
        table = _rng().standard_normal((120, 101))
        table[:, 0] = np.where(np.arange(120) % 2, 1, -1)
        return table

    np.loadtxt = loadtxt
