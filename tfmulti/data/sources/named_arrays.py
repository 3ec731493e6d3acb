"""Makes a data set of named arrays, such as `x_train` and `y_train` of an npz file or a folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import CLASSIFICATION, REGRESSION, DataSet, DataSpec, with_channels
from tfmulti.errors import DataError

# The endings that may follow `x`, `y` and `weight` in the names of the arrays of each part.
NAMES = {"train": ("", "_train"), "validation": ("_val", "_validation"), "test": ("_test",)}


def data_of(arrays: dict[str, np.ndarray], dataset: str, classes: int | None) -> DataSet:
    """Returns the data of arrays named `x`, `y` and, for sample weights, `weight`.

    `x_val` and `y_val` are the validation part, `x_test` and `y_test` the test part. `y` holds
    class labels if it has one whole number for each row; other `y` hold values to predict. Images
    [n, h, w] get an axis for the channel. The model divides uint8 inputs by 255. A memory-mapped
    `x` is not read here. If `classes` is None, the labels tell the number of classes.

    Raises:
        DataError: an array is missing, the arrays of a part differ in length, the examples of the
            parts differ in shape, a value is not a finite number, or a label is out of range.
    """
    parts = {part: _arrays_of(arrays, dataset, part) for part in NAMES}
    train = parts["train"]
    if train is None:
        raise DataError(
            f"--dataset {dataset} has the arrays {', '.join(sorted(arrays)) or 'none'}, but "
            "needs 'x' and 'y' (or 'x_train' and 'y_train'). Save both."
        )
    x, y, *_ = train
    if y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "biu":
        _refuse_one_hot(dataset, y)
    spec = _spec(dataset, x, y, classes)
    sources: dict[str, Any] = {
        name: _source(dataset, name, part, spec) for name, part in parts.items() if part
    }
    return DataSet(spec=spec, **sources)


def _arrays_of(
    arrays: dict[str, np.ndarray], dataset: str, part: str
) -> tuple[np.ndarray, ...] | None:
    """Returns `x`, `y` and, if there is one, `weight` of a part; None if the part has no arrays.

    Raises DataError if `x` or `y` is missing, an array is not numeric or the lengths differ.
    """
    for ending in NAMES[part]:
        x, y = arrays.get(f"x{ending}"), arrays.get(f"y{ending}")
        weight = arrays.get(f"weight{ending}")
        if x is None and y is None:
            continue
        if x is None or y is None:
            missing = f"{'x' if x is None else 'y'}{ending}"
            raise DataError(f"--dataset {dataset} lacks the array {missing!r}. Add it.")
        named = {f"x{ending}": x, f"y{ending}": y}
        if weight is not None:
            named[f"weight{ending}"] = weight
        for name, array in named.items():
            if array.ndim == 0 or not len(array):
                raise DataError(f"--dataset {dataset}: {name} has no rows.")
            if array.dtype.kind not in "biuf":
                raise DataError(
                    f"--dataset {dataset}: {name} is of type {array.dtype}, but must be numeric."
                )
        if len(x) != len(y):
            raise DataError(
                f"--dataset {dataset}: x{ending} has {len(x)} rows and y{ending} has {len(y)}. "
                "Each example needs a target."
            )
        if weight is not None and weight.shape != (len(x),):
            raise DataError(
                f"--dataset {dataset}: weight{ending} has the shape {weight.shape}, but must have "
                f"one number for each of the {len(x)} rows of x{ending}."
            )
        return tuple(named.values())
    return None


def _refuse_one_hot(dataset: str, y: np.ndarray) -> None:
    """Raises DataError if `y` is one-hot."""
    if ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all():
        raise DataError(
            f"--dataset {dataset}: y of shape {y.shape} is one-hot. Save class labels: "
            "y.argmax(axis=1)."
        )


def _spec(dataset: str, x: np.ndarray, y: np.ndarray, classes: int | None) -> DataSpec:
    """Returns the form of an example; raises DataError if labels and `classes` do not fit."""
    images = with_channels(x)
    dtype = "uint8" if images.dtype == np.uint8 else "float32"
    scale = 1 / 255 if images.dtype == np.uint8 else 1.0
    flat = y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)
    if flat and y.dtype.kind in "biu":
        if classes is None:
            classes = int(y.max()) + 1
            if classes > max(len(y), 2):
                raise DataError(
                    f"--dataset {dataset}: the largest label of y is {classes - 1} in row "
                    f"{int(y.argmax())}, out of range for {len(y)} examples. Number the classes "
                    f"from 0, or say how many there are: {dataset},classes=N."
                )
        return DataSpec(images.shape[1:], dtype, CLASSIFICATION, max(classes, 2), scale)
    if classes is not None:
        _check_finite(dataset, "y", y)
        raise DataError(
            f"--dataset {dataset}: y is of type {y.dtype} and shape {y.shape}, but classes="
            f"{classes} needs whole-number labels."
        )
    outputs = int(np.prod(y.shape[1:], dtype=int))
    return DataSpec(images.shape[1:], dtype, REGRESSION, outputs, scale)


def _source(dataset: str, part: str, arrays: tuple[np.ndarray, ...], spec: DataSpec) -> ArraySource:
    """Returns the source of one part; raises DataError if a value does not fit the form."""
    x, y, weights = with_channels(arrays[0]), arrays[1], arrays[2:]
    # A conversion or a check would read all of a memory-mapped array.
    if not isinstance(x, np.memmap):
        x = x if spec.input_dtype == x.dtype.name else x.astype(spec.input_dtype)
        _check_finite(dataset, f"x of the {part} part", x)
    _check_finite(dataset, f"y of the {part} part", y)
    for weight in weights:
        _check_finite(dataset, f"weight of the {part} part", weight)
    dtypes = (spec.input_dtype, "float32" if spec.task == REGRESSION else "int32", "float32")
    if x.shape[1:] != spec.input_shape:
        raise DataError(
            f"--dataset {dataset}: examples of the {part} part have shape {x.shape[1:]}, but "
            f"those of the training part have {spec.input_shape}."
        )
    if spec.task == REGRESSION:
        return ArraySource((x, y.reshape(len(y), -1), *weights), dtypes[: len(arrays)])
    if y.dtype.kind == "f":
        raise DataError(f"--dataset {dataset}: y of the {part} part must be whole numbers.")
    outside = (y < 0) | (y >= spec.outputs)
    if outside.any():
        row = int(np.argmax(outside))
        raise DataError(
            f"--dataset {dataset}: label {y.reshape(-1)[row]} in row {row} of the {part} part is "
            f"out of range 0..{spec.outputs - 1}. Fix it, or say {dataset},classes=N."
        )
    return ArraySource((x, y.reshape(len(y)), *weights), dtypes[: len(arrays)])


def _check_finite(dataset: str, name: str, values: np.ndarray) -> None:
    """Raises DataError if a floating-point array has NaN or infinity; names the row."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = ~np.isfinite(values)
        row = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
        raise DataError(
            f"--dataset {dataset}: {name} is {values[row].reshape(-1)[bad[row].reshape(-1)][0]} "
            f"in row {row}. Remove such rows."
        )
