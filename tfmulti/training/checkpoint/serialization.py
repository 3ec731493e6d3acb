"""Writes plain values as JSON and arrays, and reads them again.

A checkpoint holds plain values. These are None, bool, int, float, str, bytes, NumPy's arrays and
scalars of any dtype but objects, and lists, tuples, sets and dicts of plain values. They are read
as they were written, with the same bits and the same types. A value of a derived class, such as a
namedtuple, is not plain. It would be read as a value of the class from which its class derives.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tfmulti.data.formats.npy_format import array_of
from tfmulti.errors import TfmultiError

_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
# The dtypes that `ml_dtypes` adds to those of NumPy, such as bfloat16.
_MORE_DTYPES = {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_TYPES: dict[str, Callable[[list[Any]], Any]] = {name: kind for kind, name in _CONTAINERS.items()}


class NotPlainError(TfmultiError):
    """Raised for a value that is not plain.

    Args:
        place: where the value stands in the whole, such as `history['loss']`.
        kind: the name of the value's type.

    Attributes:
        place: the argument `place`.
        kind: the argument `kind`.
    """

    def __init__(self, place: str, kind: str) -> None:
        super().__init__(f"{place or 'it'} is a {kind}")
        self.place, self.kind = place, kind


def copied(value: Any, place: str = "") -> Any:
    """Returns a copy of a plain value that shares nothing with it.

    Args:
        value: the value.
        place: the name of the value in error messages.

    Raises:
        NotPlainError: the value is not plain, or contains itself.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is np.ndarray or isinstance(value, np.generic):
        if _type_name(value.dtype) is None:
            raise NotPlainError(place, f"NumPy array of {value.dtype}")
        return value.copy()
    try:
        if kind is dict:
            return {
                copied(key, f"the key {key!r} of {place or 'it'}"): copied(
                    item, f"{place}[{key!r}]"
                )
                for key, item in value.items()
            }
        if kind in (list, tuple):
            return kind(copied(item, f"{place}[{number}]") for number, item in enumerate(value))
        if kind in _CONTAINERS:
            return kind(copied(item, f"an item of {place or 'it'}") for item in value)
    except RecursionError:
        raise NotPlainError(place[:40], f"{kind.__qualname__} that contains itself") from None
    raise NotPlainError(place, kind.__qualname__)


def to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns a plain value as a tree for JSON, in which a number stands for each array.

    Args:
        value: the plain value.
        arrays: the list to which the arrays are appended. The numbers are indices in it.
    """
    if isinstance(value, np.generic):
        arrays.append(np.asarray(value))
        return {"scalar": len(arrays) - 1}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {"dict": {key: to_json(item, arrays) for key, item in value.items()}}
        return {"items": [[to_json(part, arrays) for part in pair] for pair in value.items()]}
    kind = type(value)
    if kind in _CONTAINERS:
        items = [to_json(item, arrays) for item in value]
        return items if kind is list else {_CONTAINERS[kind]: items}
    return value


def from_json(node: Any, arrays: list[np.ndarray]) -> Any:
    """Returns the value from which `to_json` made a tree.

    Args:
        node: the tree.
        arrays: the arrays. Those that are used are replaced by None in the list.

    Raises:
        ValueError: the tree has another form, or uses an array twice. An array used twice would be
            written twice, so a small crafted file could grow without limit.
        LookupError: the tree names an array or a type that there is not.
        TypeError: the tree has another form.
    """
    if isinstance(node, list):
        return [from_json(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, inner),) = node.items()
    if kind == "array":
        return _taken(arrays, inner)
    if kind == "scalar":
        return _taken(arrays, inner)[()]
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "dict":
        return {key: from_json(item, arrays) for key, item in inner.items()}
    if kind == "items":
        return {from_json(key, arrays): from_json(item, arrays) for key, item in inner}
    return _TYPES[kind](from_json(inner, arrays))


def _taken(arrays: list[Any], number: Any) -> np.ndarray:
    """Returns an array of a list, and replaces it by None there."""
    if type(number) is not int or number < 0 or arrays[number] is None:
        raise ValueError("the file refers to an array that does not exist or was already used")
    array: np.ndarray = arrays[number]
    arrays[number] = None
    return array


def to_npy(array: np.ndarray) -> tuple[str, bytes]:
    """Returns the name of an array's dtype in `ml_dtypes`, or "", and its `.npy` file.

    NumPy's format has no dtypes of other packages, such as bfloat16 and float8. The bits of such an
    array are written as whole numbers.
    """
    name = _type_name(array.dtype)
    assert name is not None, f"an array of {array.dtype} is not plain"
    bits = array.view(f"u{array.dtype.itemsize}") if name else array
    file = io.BytesIO()
    np.save(file, bits, allow_pickle=False)
    return name, file.getvalue()


def from_npy(name: str, data: bytes) -> np.ndarray:
    """Returns the array from which `to_npy` made a name and a file."""
    array = array_of(data)
    return array.view(_MORE_DTYPES[name]) if name else array


def _type_name(dtype: np.dtype[Any]) -> str | None:
    """Returns a dtype's name in `ml_dtypes`, "" for NumPy's own, or None if it is not plain."""
    # Kind T is NumPy's text of variable length, whose elements lie outside of the array.
    if dtype.hasobject or dtype.kind == "T":
        return None
    # With 2, NumPy says that another package has registered the dtype.
    if dtype.isbuiltin != 2:
        return ""
    return dtype.name if _MORE_DTYPES.get(dtype.name) == dtype else None
