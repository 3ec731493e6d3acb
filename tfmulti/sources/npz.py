"""Arrays in an .npz file of NumPy's."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from tfmulti.errors import DataError
from tfmulti.sources.arrays import ArraySource
from tfmulti.sources.data import (
    CLASSIFICATION,
    REGRESSION,
    Data,
    DataSpec,
    labelled,
    with_channels,
)
from tfmulti.sources.options import parse_options

_NAMES = {"train": ("", "_train"), "validation": ("_val", "_validation"), "test": ("_test",)}


def load(options: str, seed: int) -> Data:
    """Returns the data of `PATH[,classes=N]`, read without unpickling anything.

    The file holds `x` and `y` (or `x_train`, `y_train`), and may hold `x_val`, `y_val`,
    `x_test`, `y_test`. Whole-number `y` are class labels, others are values to predict.
    Images [n, h, w] get a channel; uint8 inputs are divided by 255 by the model.

    Raises:
        DataError: the file is missing, damaged or pickled, lacks an array, or the arrays
            differ in length or hold labels that are no labels.
    """
    path, _, rest = options.partition(",")
    chosen = parse_options(f"npz:{path}", rest, {"classes": None})
    arrays = _read(path)
    parts = {part: _pair(arrays, path, part) for part in _NAMES}
    if parts["train"] is None:
        raise DataError(
            f"--dataset npz:{path} has the arrays {', '.join(sorted(arrays)) or 'none'}, but "
            "needs 'x' and 'y' (or 'x_train' and 'y_train'). Save with np.savez(path, x=…, y=…)."
        )
    x, y = parts["train"]
    if y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "biu":
        _refuse_one_hot(path, y)
    spec = _spec(path, x, y, chosen["classes"])
    sources = {name: _source(path, name, pair, spec) for name, pair in parts.items() if pair}
    return Data(spec=spec, **sources)


def _read(path: str) -> dict[str, np.ndarray]:
    place = f"--dataset npz:{path}"
    if not path:
        raise DataError("--dataset npz: needs a file. Write --dataset npz:PATH.")
    file = Path(path).expanduser()
    try:
        if file.stat().st_size == 0:
            raise DataError(f"{place}: the file is empty. Write it anew.")
        if file.is_file() and not zipfile.is_zipfile(file):
            raise DataError(
                f"{place} is no .npz file, or a truncated one. Save with np.savez(path, x=…, y=…)."
            )
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{place}: no such file. Give the path of an .npz file.") from None
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}. Give a readable file.") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        if "allow_pickle" in str(error):
            raise DataError(
                f"{place} holds pickled Python objects, which can run code when they are read, so "
                "they are not. Save numeric arrays."
            ) from None
        raise DataError(f"{place} is damaged or truncated ({error}). Write it anew.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{place} is damaged or truncated ({error}). Write it anew.") from None


def _pair(
    arrays: dict[str, np.ndarray], path: str, part: str
) -> tuple[np.ndarray, np.ndarray] | None:
    for ending in _NAMES[part]:
        x, y = arrays.get(f"x{ending}"), arrays.get(f"y{ending}")
        if x is None and y is None:
            continue
        if x is None or y is None:
            missing = f"{'x' if x is None else 'y'}{ending}"
            raise DataError(f"--dataset npz:{path} lacks the array {missing!r}. Add it.")
        for name, array in ((f"x{ending}", x), (f"y{ending}", y)):
            if array.ndim == 0 or not len(array):
                raise DataError(f"--dataset npz:{path}: {name} has no rows.")
            if array.dtype.kind not in "biuf":
                raise DataError(
                    f"--dataset npz:{path}: {name} is of type {array.dtype}, but must be numeric."
                )
        if len(x) != len(y):
            raise DataError(
                f"--dataset npz:{path}: x{ending} has {len(x)} rows and y{ending} has {len(y)}. "
                "Each example needs a target."
            )
        return x, y
    return None


def _refuse_one_hot(path: str, y: np.ndarray) -> None:
    if ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all():
        raise DataError(
            f"--dataset npz:{path}: y of shape {y.shape} is one-hot. Save class labels: "
            "y.argmax(axis=1)."
        )


def _spec(path: str, x: np.ndarray, y: np.ndarray, classes: int | None) -> DataSpec:
    images = with_channels(x)
    dtype = "uint8" if images.dtype == np.uint8 else "float32"
    scale = 1 / 255 if images.dtype == np.uint8 else 1.0
    flat = y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)
    if flat and y.dtype.kind in "biu":
        if classes is None:
            classes = int(y.max()) + 1
            if classes > max(len(y), 2):
                raise DataError(
                    f"--dataset npz:{path}: the largest label of y is {classes - 1}, out of range "
                    f"for {len(y)} examples. Number the classes from 0, or say how many there "
                    f"are: npz:{path},classes=N."
                )
        return DataSpec(images.shape[1:], dtype, CLASSIFICATION, max(classes, 2), scale)
    if classes is not None:
        _check_finite(path, "y", y)
        raise DataError(
            f"--dataset npz:{path}: y is of type {y.dtype} and shape {y.shape}, but classes="
            f"{classes} needs whole-number labels."
        )
    outputs = int(np.prod(y.shape[1:], dtype=int))
    return DataSpec(images.shape[1:], dtype, REGRESSION, outputs, scale)


def _source(
    path: str, part: str, pair: tuple[np.ndarray, np.ndarray], spec: DataSpec
) -> ArraySource:
    x, y = with_channels(pair[0]), pair[1]
    x = x if spec.input_dtype == x.dtype.name else x.astype(spec.input_dtype)
    _check_finite(path, f"x of the {part} part", x)
    _check_finite(path, f"y of the {part} part", y)
    if x.shape[1:] != spec.input_shape:
        raise DataError(
            f"--dataset npz:{path}: examples of the {part} part have shape {x.shape[1:]}, but "
            f"those of the training part have {spec.input_shape}."
        )
    if spec.task == REGRESSION:
        return ArraySource((x, y.reshape(len(y), -1).astype(np.float32)))
    if y.dtype.kind == "f":
        raise DataError(f"--dataset npz:{path}: y of the {part} part must be whole numbers.")
    outside = (y < 0) | (y >= spec.outputs)
    if outside.any():
        row = int(np.argmax(outside))
        raise DataError(
            f"--dataset npz:{path}: label {y.reshape(-1)[row]} in row {row} of the {part} part is "
            f"out of range 0..{spec.outputs - 1}. Fix it, or say npz:{path},classes=N."
        )
    return labelled(x, y)


def _check_finite(path: str, name: str, values: np.ndarray) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = ~np.isfinite(values)
        row = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
        raise DataError(
            f"--dataset npz:{path}: {name} is {values[row].reshape(-1)[bad[row].reshape(-1)][0]} "
            f"in row {row}. Remove such rows."
        )
