"""The features of the records of a data set, as a JSON file describes them.

    {
      "features": {
        "image": {"type": "image", "shape": [224, 224, 3]},
        "label": {"type": "int64", "shape": []}
      },
      "x": "image",
      "y": "label",
      "classes": 10
    }

| type | in the record | of an example |
|---|---|---|
| `image` | an encoded image (jpeg, png, bmp, webp) | uint8 of `shape`, resized to it |
| `raw` | the bytes of a tensor, little-endian | `dtype` of `shape` |
| `int64`, `float32` | as many numbers as `shape` holds | the same, of `shape` |
| `string`, `bytes` | as many byte strings as `shape` holds | the same, of `shape` |

`x` may be a list of names; the model then gets a dict of them. `y` is a name or a list, too.
`weight` names a float32 of each example. A missing `shape` stands for `[]`, one value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfmulti.config import json_values
from tfmulti.data.data_set import CLASSIFICATION, REGRESSION, DataSpec
from tfmulti.data.source import Leaf
from tfmulti.errors import DataError, did_you_mean

TYPES = ("image", "raw", "int64", "float32", "string", "bytes")
DTYPES = (
    *("uint8", "int8", "uint16", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
_KEYS = ("features", "x", "y", "weight", "classes")


@dataclass(frozen=True)
class Feature:
    """One value of a record: its type there, and its shape and dtype in an example."""

    type: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def leaf(self) -> Leaf:
        """The form of the value in an example."""
        return Leaf(self.shape, self.dtype)


@dataclass(frozen=True)
class Features:
    """The features of a record, and which of them are input, target and weight.

    Attributes:
        features: all described features, by name.
        x: the name of the input, or several names; the input is then a dict of them.
        y: the name or the names of the target.
        weight: the name of the sample weight, or None.
        classes: the number of classes, or None if it is not given.
    """

    features: Mapping[str, Feature]
    x: str | tuple[str, ...]
    y: str | tuple[str, ...]
    weight: str | None = None
    classes: int | None = None

    @property
    def names(self) -> Any:
        """The form of an example with names as leaves: `(x, y)` or `(x, y, weight)`."""
        parts = [
            part if isinstance(part, str) else {name: name for name in part}
            for part in (self.x, self.y)
        ]
        return (*parts, self.weight) if self.weight is not None else tuple(parts)


def read_features(path: str, text: bytes) -> Features:
    """Returns the features that a JSON text describes; `path` names the file in messages.

    Raises:
        DataError: the text is not JSON, or does not follow the format of this module.
    """
    try:
        content = json_values.parse(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. Fix that line.") from None
    if not isinstance(content, dict):
        raise DataError(
            f'{path} does not hold a JSON object. Write {{"features": {{…}}, "x": …, "y": …}}.'
        )
    if "pythonClassName" in content:
        raise DataError(
            f"{path} belongs to tensorflow-datasets. Use --dataset tfds:NAME,data_dir=PATH."
        )
    for key in content:
        if key not in _KEYS:
            raise DataError(f"{path}: no entry {key!r}; {did_you_mean(key, _KEYS)}")
    described = content.get("features")
    if not isinstance(described, dict) or not described:
        raise DataError(f'{path} needs "features": {{NAME: {{"type": …, "shape": […]}}, …}}.')
    features = {name: _feature(f"{path}: feature {name!r}", f) for name, f in described.items()}
    return Features(
        features,
        _names(path, features, "x", content.get("x")),
        _names(path, features, "y", content.get("y")),
        _weight(path, features, content.get("weight")),
        _classes(path, content.get("classes")),
    )


def _feature(prefix: str, described: Any) -> Feature:
    """Returns the described feature; raises DataError if the description is wrong."""
    keys = ("type", "shape", "dtype")
    if not isinstance(described, dict):
        raise DataError(f'{prefix} is {described!r}. Write {{"type": "int64", "shape": []}}.')
    for key in described:
        if key not in keys:
            raise DataError(f"{prefix}: no entry {key!r}; {did_you_mean(key, keys)}")
    kind = described.get("type")
    if kind not in TYPES:
        raise DataError(f"{prefix}: no type {kind!r}; {did_you_mean(str(kind), TYPES)}")
    shape = described.get("shape", [])
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise DataError(
            f"{prefix}: shape is {json.dumps(shape)}, but it must be a list of whole numbers from "
            "1, such as [28, 28, 1]. Records of varying shape need your own --dataset."
        )
    if kind == "image" and (len(shape) != 3 or shape[2] not in (1, 3)):
        raise DataError(
            f"{prefix}: an image of shape {json.dumps(shape)} cannot be read. "
            "Write [height, width, 3], or 1 for grey."
        )
    return Feature(kind, tuple(shape), _dtype(prefix, kind, described.get("dtype")))


def _dtype(prefix: str, kind: str, dtype: Any) -> str:
    """Returns the dtype of a feature in an example; raises DataError if `dtype` is wrong."""
    if kind == "raw":
        if dtype not in DTYPES:
            raise DataError(
                f"{prefix}: no dtype {dtype!r} for raw bytes; {did_you_mean(str(dtype), DTYPES)}"
            )
        return str(dtype)
    if dtype is not None:
        raise DataError(f"{prefix}: dtype belongs to the type 'raw' alone. Leave it out.")
    return {"image": "uint8", "string": "str", "bytes": "str"}.get(kind, kind)


def _names(
    path: str, features: Mapping[str, Feature], key: str, named: Any
) -> str | tuple[str, ...]:
    """Returns the name or names of `x` or `y`; raises DataError if one is not a feature."""
    names = named if isinstance(named, list) else [named]
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{path} needs {json.dumps(key)}: the name of a feature, or a list of names. "
            f"Known: {', '.join(features)}."
        )
    for name in names:
        if name not in features:
            raise DataError(
                f"{path}: {key} is {name!r}, which is not a feature; {did_you_mean(name, features)}"
            )
    return named if isinstance(named, str) else tuple(names)


def _weight(path: str, features: Mapping[str, Feature], name: Any) -> str | None:
    """Returns the name of the weight; raises DataError unless it is one float32."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in features:
        raise DataError(
            f"{path}: weight is {name!r}, which is not a feature; "
            f"{did_you_mean(str(name), features)}"
        )
    if features[name].leaf != Leaf((), "float32"):
        raise DataError(f'{path}: the weight {name!r} must be {{"type": "float32", "shape": []}}.')
    return str(name)


def _classes(path: str, classes: Any) -> int | None:
    """Returns the number of classes; raises DataError unless it is None or at least 1."""
    if classes is not None and (type(classes) is not int or classes < 1):
        raise DataError(f"{path}: classes is {classes!r}, but it must be a number from 1.")
    return classes


def is_label(leaf: Leaf) -> bool:
    """Returns whether a target of this form can be the number of a class."""
    return leaf.shape in ((), (1,)) and leaf.dtype != "str" and np.dtype(leaf.dtype).kind in "iu"


def spec_of(x: Any, y: Any, classes: int | None) -> DataSpec | None:
    """Returns what a model must know about such examples; None if only a user's own model does.

    `x` and `y` are the forms of the input and the target: a `Leaf`, or a nest of them.
    """
    if not isinstance(x, Leaf) or not isinstance(y, Leaf) or "str" in (x.dtype, y.dtype):
        return None
    if x.dtype not in ("uint8", "float32"):
        return None
    scale = 1 / 255 if x.dtype == "uint8" else 1.0
    if is_label(y):
        if classes is None:
            return None
        return DataSpec(x.shape, x.dtype, CLASSIFICATION, max(classes, 2), scale)
    if len(y.shape) > 1 or np.dtype(y.dtype).kind != "f":
        return None
    return DataSpec(x.shape, x.dtype, REGRESSION, int(np.prod(y.shape, dtype=int)), scale)
