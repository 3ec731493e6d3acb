"""Copies of values in Python, by which a later change of the values is found.

A copy is a tuple of the value's kind and its content. Copies of equal values are equal, and those
of different ones are not, as far as that is known. Equal means: as Python's `==` says, but True is
not 1, NaN is NaN, and dicts have the same order. Numbers, texts and collections of them are copied.
Of an array the copy has a checksum. An object is held itself: it equals another one if its class
says so, or else only itself. A change inside of it is seen if it is an iterator, a file, or an
object of an extension in C that can be pickled.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import random
import types
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.python_attributes import classes_of_user, slots_of

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
PARTS_OF_KERAS = (
    *(keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint, keras.Initializer),
    *(keras.optimizers.schedules.LearningRateSchedule, keras.Variable),
)
# Generators of random numbers.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
# The types of values that have no attributes of the user's own.
NUMBERS_AND_TEXTS: frozenset[type] = frozenset({bool, int, float, str, bytes, type(None)})
# Those of them for which `==` is right: True equals 1, and NaN does not equal itself.
_ALIKE = NUMBERS_AND_TEXTS - {bool, float}
_TENSORS = (tf.Tensor, tf.Variable, tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)
_Seen = dict[int, tuple[int, Any]]
_LISTS = (list, tuple, collections.deque, collections.UserList)


class _Unknown:
    """Stands for a value that cannot be compared: it equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_UNKNOWN = _Unknown()
# The copy of None, and of an attribute that is absent.
ABSENT = ("None", None)


class _Same:
    """An object that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self._held = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)


class _Equal:
    """An object that equals others of its class as the class says."""

    def __init__(self, value: Any) -> None:
        self._held = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Equal) or type(self._held) is not type(other._held):
            return False
        return self._held is other._held or bool(self._held == other._held)

    def __hash__(self) -> int:
        return hash(self._held)


def copied(value: Any) -> Any:
    """Returns a copy of a value for `has_changed`: a tuple that begins with the value's kind."""
    return _copied(value, {})


def has_changed(before: Any, now: Any) -> bool:
    """Returns whether two copies are known to differ."""
    try:
        return bool(before != now)
    except Exception:  # The user's own class may raise anything.
        return False


def _copied(value: Any, seen: _Seen) -> Any:
    """Returns what `copied` does.

    Args:
        value: the value.
        seen: the collections that were met before, by their ids, each after its number in the order
            in which they were met.
    """
    try:
        kind = type(value)
        if kind in NUMBERS_AND_TEXTS:
            return _plain(value)
        if kind is tuple and _ALIKE.issuperset(map(type, value)):
            return "collection", value
        if kind in (list, tuple, dict):
            return _collection(value, seen)
        return _other(value, seen)
    except Exception:  # The user's own class may raise anything.
        return _UNKNOWN


def _plain(value: Any) -> tuple[str, Any]:
    """Returns the copy of a number, a text or None."""
    if value is None:
        return ABSENT
    if isinstance(value, (bool, np.bool_)):
        return "bool", bool(value)
    if isinstance(value, (str, bytes)):
        return "text", value
    return "number", "nan" if value != value else value


def _collection(value: Any, seen: _Seen) -> tuple[Any, ...]:
    """Returns the copy of a list, a tuple or a dict, or of an object that acts as one."""
    is_mapping = not isinstance(value, _LISTS)
    pairs: list[tuple[Any, Any]] = []
    if is_mapping:
        # The methods of a subclass may do anything, and a proxy is no dict.
        pairs = list(dict.items(value) if issubclass(type(value), dict) else value.items())
    items = [item for _, item in pairs] if is_mapping else list(value)
    # Python may share equal tuples of constants, so whether they are the same one says nothing.
    is_plain = isinstance(value, tuple) and NUMBERS_AND_TEXTS.issuperset(map(type, items))
    if not is_plain and id(value) in seen:
        return "collection", "again", seen[id(value)][0]
    # A list that was made for this copy alone must stay, or another one may get its id.
    seen.setdefault(id(value), (len(seen), value))
    keys = [key for key, _ in pairs]
    return "collection", _entries(keys, seen), _entries(items, seen)


def _entries(values: list[Any], seen: _Seen) -> tuple[Any, ...]:
    """Returns the copies of the entries of a collection, which may be many."""
    kinds = set(map(type, values))
    if not kinds <= NUMBERS_AND_TEXTS:
        return tuple(_copied(value, seen) for value in values)
    if float in kinds:
        values = ["nan" if value != value else value for value in values]
    # True equals 1.
    return tuple(values), tuple(map(type, values)) if bool in kinds else ()


def _other(value: Any, seen: _Seen) -> Any:
    """Returns the copy of a value of another type than Python's most usual ones."""
    kind = type(value)
    if kind in weakref.ProxyTypes:
        return _UNKNOWN
    if isinstance(value, (bool, np.bool_, str, bytes, int, float, complex, np.number)):
        return _plain(value)
    if isinstance(value, (*FUNCTIONS, type, range)):
        return "part", value
    if isinstance(value, (bytearray, array.array)):
        return "text", bytes(value)
    if isinstance(value, slice):
        return "part", (value.start, value.stop, value.step)
    if isinstance(value, np.ndarray):
        return _array(value, seen)
    if hasattr(kind, "to_numpy"):
        # A table of pandas or of another library.
        names = [getattr(value, name, None) for name in ("columns", "index")]
        return _collection([*names, len(value), value.to_numpy()], seen)
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(_copied(item, seen) for item in value)
    if isinstance(value, functools.partial):
        return _collection([value.func, value.args, value.keywords], seen)
    # A class of settings may have the methods of a dict without being one.
    methods = ("keys", "items", "__getitem__", "__len__")
    is_mapping = isinstance(value, Mapping) or all(hasattr(kind, name) for name in methods)
    if is_mapping or isinstance(value, _LISTS):
        return _collection(value, seen)
    if isinstance(value, _TENSORS):
        return _UNKNOWN if tf.is_symbolic_tensor(value) else ("tensor", _Same(value))
    if isinstance(value, PARTS_OF_KERAS):
        return "part", _Same(value)
    if any("__eq__" in vars(cls) for cls in kind.__mro__[:-1]):
        return "part", _Equal(value), _state_in_c(value, seen)
    if kind.__module__ != "builtins" and not classes_of_user(kind):
        return _UNKNOWN
    return "part", _Same(value), _state_in_c(value, seen)


def _state_in_c(value: Any, seen: _Seen) -> Any:
    """Returns a copy of what an object holds in C, such as the position of an iterator or a file.

    It is empty for an object with attributes, which `kept_values` compares, and for generators of
    random numbers, which `python_effects` compares.
    """
    try:
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            # A generator that has ended has no frame.
            inside = [frame.f_lasti, dict(frame.f_locals)] if frame is not None else []
            return _collection(inside, seen)
        if isinstance(value, io.IOBase):
            return value.tell() if value.readable() else ABSENT
        if type(value).__dictoffset__ or slots_of(value) or isinstance(value, GENERATORS):
            return ABSENT
        copies = [_collection(value.__reduce_ex__(4), dict(seen)) for _ in range(2)]
        # An iterator such as `itertools.cycle` may tell its state by a new iterator each time.
        return ABSENT if has_changed(*copies) else copies[0]
    except Exception:  # Not each object can tell it.
        return ABSENT


def _array(value: np.ndarray, seen: _Seen) -> tuple[Any, ...]:
    """Returns the copy of an array, which has a checksum of its numbers."""
    if isinstance(value, np.ma.MaskedArray):
        return _collection([np.asarray(value.data), np.ma.getmaskarray(value)], seen)
    if value.dtype.hasobject or value.dtype.kind in "US":
        return _collection([value.shape, value.reshape(-1).tolist()], seen)
    numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return "array", value.dtype, value.shape, zlib.crc32(numbers.data)
