"""Data that a function of the user returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import CLASSIFICATION, PARTS, REGRESSION, DataSet, DataSpec
from tfmulti.data.source import Source
from tfmulti.errors import DataError


def load(dataset: str, function: Callable[..., Any], global_batch_size: int) -> DataSet:
    """Returns the data of `package.module:function`.

    The function returns `train`, `(train, validation)` or `(train, validation, test)`, or a dict
    with these names. A part is `(x, y)` or `(x, y, sample_weight)` of arrays, a `tf.data.Dataset`
    of global batches, a PyDataset or a `Source`. If the function has a parameter
    `global_batch_size`, it is called with that.

    Raises:
        DataError: the function needs other arguments, returns something else, or returns no
            training data.
    """
    parameters = inspect.signature(function).parameters
    takes_batch = "global_batch_size" in parameters
    _check_needs_no_more(dataset, parameters)
    returned = function(global_batch_size=global_batch_size) if takes_batch else function()
    parts = _parts(dataset, returned)
    if parts["train"] is None:
        raise DataError(
            f"--dataset {dataset} returned None for the training data. Return (x, y), or (train, "
            "validation, test) of which each is (x, y) or a Dataset."
        )
    sources = {name: _source(dataset, p) for name, p in parts.items() if p is not None}
    return DataSet(spec=_spec(sources["train"]), **sources)


def rows_of_batches(train: Any) -> int | None:
    """Returns the rows of a batch if training data comes in batches and their size is known.

    Otherwise it returns None. The first batch of a PyDataset is read.
    """
    if isinstance(train, keras.utils.PyDataset):
        first = keras.tree.flatten(train[0])
        return len(first[0]) if first else None
    if isinstance(train, tf.data.Dataset):
        shapes = [spec.shape for spec in tf.nest.flatten(train.element_spec)]
        return shapes[0][0] if shapes and shapes[0].rank else None
    return None


def check_labels(dataset: str, data: DataSet) -> None:
    """Checks that all labels are classes of the training part, for which a built-in model is made.

    Raises:
        DataError: a label is not such a class; the message says where it is.
    """
    if data.spec is None or data.spec.task != CLASSIFICATION:
        return
    for name, part in data.parts.items():
        if not isinstance(part, ArraySource) or not isinstance(part.data, tuple):
            continue
        labels = part.data[1]
        if not isinstance(labels, np.ndarray):
            continue
        outside = np.flatnonzero((labels < 0) | (labels >= data.spec.outputs))
        if len(outside):
            raise DataError(
                f"--dataset {dataset}: y of the {name} part is {labels[outside[0]]} in row "
                f"{outside[0]}, but whole numbers are classes, here 0..{data.spec.outputs - 1} as "
                "in the training part. Number the classes from 0, or give float32 for a regression."
            )


def _check_needs_no_more(dataset: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raises DataError if a function needs arguments other than the batch size."""
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if set(needed) - {"global_batch_size"}:
        raise DataError(
            f"--dataset {dataset} needs the arguments {', '.join(needed)}. It may take one: "
            "global_batch_size."
        )


def _parts(dataset: str, returned: Any) -> dict[str, Any]:
    """Returns the parts that a function has returned, by name; raises DataError for others."""
    if isinstance(returned, dict) and set(returned) <= set(PARTS) and "train" in returned:
        return returned
    if not isinstance(returned, (tuple, list)):
        return {"train": returned}
    if 1 <= len(returned) <= 3 and not any(_is_array(item) for item in returned):
        return dict(zip(PARTS, returned, strict=False))
    if 2 <= len(returned) <= 3:
        return {"train": tuple(returned)}
    raise DataError(
        f"--dataset {dataset} returned {len(returned)} items. Return (x, y), or (train, "
        "validation, test) of which each is (x, y) or a Dataset."
    )


def _is_array(item: Any) -> bool:
    """Returns whether a value looks like an array."""
    return hasattr(item, "shape") and hasattr(item, "dtype")


def _source(dataset: str, part: Any) -> Any:
    """Returns a part in a form that `fit` takes; raises DataError if there is none."""
    if isinstance(part, (tuple, list)):
        return ArraySource(tuple(part), floats=keras.config.floatx())
    if isinstance(part, (tf.data.Dataset, keras.utils.PyDataset, Source)):
        return part
    raise DataError(
        f"--dataset {dataset} returned a {type(part).__name__}. Return arrays (x, y), a "
        "tf.data.Dataset of global batches or a keras.utils.PyDataset."
    )


def _spec(train: Any) -> DataSpec | None:
    """Returns the form of arrays that a built-in model can take; None for other data."""
    if not isinstance(train, ArraySource) or not isinstance(train.data, tuple):
        return None
    x, y, *_ = (*train.data, None)
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return None
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    if y.dtype.kind in "biu" and y.ndim == 1:
        outputs = max(int(y.max()) + 1, 2)
        return DataSpec(x.shape[1:], x.dtype.name, CLASSIFICATION, outputs, scale)
    outputs = int(np.prod(y.shape[1:], dtype=int))
    return DataSpec(x.shape[1:], x.dtype.name, REGRESSION, outputs, scale)
