"""The values in Python that a compiled step keeps from the time when it was traced.

A step may read attributes of the model's objects, and values outside of its functions: globals,
values of a closure, and attributes of the user's own modules, classes and objects. The graph of the
step keeps the values of the time when TensorFlow traced it. `read` returns copies of these values,
and `first_new_value` compares the copies with the values of now.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.python_attributes import (
    attributes_of_keras,
    classes_of_user,
    numbers_of,
)
from tfmulti.training.state import relocation
from tfmulti.training.state.user_lines import is_module_of_user

# The methods by which a step begins to run the code of a model, a layer, a loss or a metric.
_OF_STEPS = frozenset(
    [
        "__call__",
        "call",
        "train_step",
        "test_step",
        "predict_step",
        "compute_loss",
        "compute_metrics",
        "update_state",
        "result",
        "update_step",
    ]
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PARTS_OF_KERAS = (
    *(keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint, keras.Initializer),
    *(keras.optimizers.schedules.LearningRateSchedule, keras.Variable),
)
# Private attributes of Keras' parts that hold what their public properties set.
_BEHIND_PROPERTIES = ("_trainable", "_learning_rate")
# Collections of more entries are data, and would take time to compare.
_MOST_ENTRIES = 1000
# Of an array with more numbers, some are compared, which are spread evenly.
_MOST_NUMBERS = 100_000
_DEEPEST = 4


class Kept(NamedTuple):
    """Some values that a step may have read.

    Attributes:
        read: returns the values as they are now, by name.
        words: returns a name in words.
        before: for each name, what `_comparable` returned for its value.
    """

    read: Callable[[], Mapping[str, Any]]
    words: Callable[[str], str]
    before: dict[str, Any]


def read(found: relocation.State) -> list[Kept]:
    """Returns the values that a step may have read, for `first_new_value`.

    Args:
        found: what `relocation.find` found from the model, after the step was traced.
    """
    functions = list(_functions_of_steps(found))
    named = frozenset[str]().union(*(relocation.names_in(f.__code__) for f in functions))
    readers: list[tuple[Callable[[], Mapping[str, Any]], Callable[[str], str]]] = []
    for owner in found.objects:
        attributes = functools.partial(_attributes, owner, named)
        readers.append((attributes, functools.partial(_of, owner)))
    for variable in found.variables:
        rules = functools.partial(_rules_of_variable, variable)
        readers.append((rules, functools.partial(_of, variable)))
    for function in functions:
        outside = functools.partial(_outside, function)
        readers.append((outside, functools.partial(_read_by, function)))
    kept = []
    for read_now, words in readers:
        before = {name: _comparable(value) for name, value in read_now().items()}
        kept.append(Kept(read_now, words, before))
    return kept


def first_new_value(values: Sequence[Kept]) -> str | None:
    """Returns the first value that is another one since `read`, or None.

    A change of a layer's `trainable` counts, too.

    Returns:
        The value in words, such as `Dropout.rate of 'dropout_1'`.
    """
    for read_now, words, before in values:
        now = read_now()
        for name, value in before.items():
            if _is_new(value, _comparable(now.get(name))):
                return words(name)
    return None


def _of(owner: Any, name: str) -> str:
    """Returns an attribute in words, such as `Dropout.rate of 'dropout_1'`."""
    has_name = isinstance(owner, (keras.layers.Layer, keras.Variable))
    of = f" of {owner.name!r}" if has_name else ""
    return f"{type(owner).__name__}.{name.removeprefix('_')}{of}"


def _read_by(function: types.FunctionType, name: str) -> str:
    """Returns a value outside of a function in words, such as `rate, which Critic.call reads,`."""
    return f"{name}, which {function.__qualname__.rpartition('<locals>.')[2]} reads,"


def _attributes(owner: Any, named: frozenset[str]) -> dict[str, Any]:
    """Returns the attributes of an object that a step may read.

    Of an object of the user's own these are the ones that are named by the functions of steps. Of a
    part of Keras they are the settings that Keras' code names, such as an activation.
    """
    kind: type = type(owner)
    own = classes_of_user(kind)
    values = {**numbers_of(owner), **vars(owner)}
    ignored = attributes_of_keras()

    def may_be_read(name: str, value: Any) -> bool:
        # TensorFlow counts in an attribute with `_self_` how often a checkpoint was written.
        if name in ignored or name.startswith("_self_" if own else "_"):
            return name in _BEHIND_PROPERTIES
        if own:
            return name in named
        is_data = isinstance(value, (np.ndarray, list, tuple, dict, set))
        return not is_data and name in _named_by_keras(kind)

    return {name: value for name, value in values.items() if may_be_read(name, value)}


@functools.cache
def _named_by_keras(cls: type) -> frozenset[str]:
    """Returns the names in the methods of a class of Keras, which a user's attributes have not."""
    functions = [v for part in cls.__mro__ for v in vars(part).values() if hasattr(v, "__code__")]
    return frozenset[str]().union(*(relocation.names_in(f.__code__) for f in functions))


def _rules_of_variable(variable: Any) -> dict[str, Any]:
    """Returns what Keras reads of a variable while it traces a step."""
    return {"regularizer": variable.regularizer, "constraint": variable.constraint}


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values outside of a function that its code names.

    They are defaults of its arguments, values of its closure, globals, and the attributes of the
    user's own modules, classes and objects among these, such as `config.rate`.
    """
    code, outside = function.__code__, function.__globals__
    values = {n: outside[n] for n in relocation.globals_in(code) if n in outside}
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    values |= dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    values |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # An empty cell raises ValueError.
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    named, seen = relocation.names_in(code), set()
    to_read = list(values.items())
    while to_read:
        name, value = to_read.pop()
        if id(value) not in seen:
            seen.add(id(value))
            attributes = _attributes_of_user(value).items()
            found = [(f"{name}.{a}", v) for a, v in attributes if a in named]
            values.update(found)
            to_read += found
    return values


def _attributes_of_user(value: Any) -> dict[str, Any]:
    """Returns the attributes of a module, a class or an object, if it is the user's own."""
    if isinstance(value, types.ModuleType):
        return vars(value) if is_module_of_user(value) else {}
    if isinstance(value, (*_FUNCTIONS, *_PARTS_OF_KERAS)) or not relocation.has_attributes(value):
        return {}
    own = classes_of_user(value if isinstance(value, type) else type(value))
    of_classes = {name: v for cls in own[::-1] for name, v in vars(cls).items()}
    return {**of_classes, **vars(value)} if own else {}


def _functions_of_steps(found: relocation.State) -> Iterator[types.FunctionType]:
    """Yields the user's functions that a step may call, as far as names tell.

    A step may call the methods in `_OF_STEPS`, functions that are no methods, and the methods that
    one of them names.
    """
    methods: dict[str, list[types.FunctionType]] = {}
    for owner in {type(owner): owner for owner in found.objects}.values():
        for name, function in relocation.methods_of_user(owner):
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function)
    of_classes = {function for of_name in methods.values() for function in of_name}
    to_read = [function for function in found.functions if function not in of_classes]
    for name in _OF_STEPS:
        to_read += methods.pop(name, [])
    for function in to_read:
        yield function
        # The list grows while it is read.
        for name in relocation.names_in(function.__code__) & methods.keys():
            to_read += methods.pop(name)


class _Same:
    """An object that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self._held = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


def _comparable(value: Any, depth: int = 0) -> tuple[str, Any] | None:
    """Returns a copy of a value for `_is_new`, with its kind; None if it cannot be compared."""
    if type(value) in weakref.ProxyTypes:
        return None
    if isinstance(value, (bool, np.bool_)):
        return "bool", bool(value)
    if value is None or isinstance(value, str):
        return "None" if value is None else "text", value
    if isinstance(value, (int, float, complex, np.number)):
        return "number", "nan" if value != value else value
    if isinstance(value, (*_FUNCTIONS, type)):
        return "part", value
    if isinstance(value, range):
        return "range", value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return None
        numbers = value.reshape(-1)[:: 1 + value.size // _MOST_NUMBERS]
        return "array", (value.dtype, value.shape, zlib.crc32(numbers.tobytes()))
    if isinstance(value, (set, frozenset)):
        plain = all(isinstance(item, (int, float, str)) for item in value)
        return ("set", frozenset(value)) if plain and len(value) <= _MOST_ENTRIES else None
    if isinstance(value, (list, tuple, dict, collections.deque)):
        if depth == _DEEPEST or len(value) > _MOST_ENTRIES:
            return None
        items = value.values() if isinstance(value, dict) else value
        keys = _keys_of(value) if isinstance(value, dict) else len(value)
        return "collection", (keys, [_comparable(i, depth + 1) for i in items], _Same(value))
    if isinstance(value, tf.Tensor):
        return None if tf.is_symbolic_tensor(value) else ("tensor", _Same(value))
    is_object = isinstance(value, _PARTS_OF_KERAS) or classes_of_user(type(value))
    return ("part", _Same(value)) if is_object else None


def _keys_of(value: dict[Any, Any]) -> list[Any]:
    """Returns the keys of a dict, by which two dicts are compared."""
    return [key if isinstance(key, (str, int, float)) else _Same(key) for key in value]


def _is_new(value: tuple[str, Any] | None, current: tuple[str, Any] | None) -> bool:
    """Returns whether a value that `_comparable` gave has become another one.

    A collection may collect values while a step is traced. So it is no new one if it has got more
    entries, or if it is made when it is needed and holds more than numbers and texts.
    """
    if value is None or current is None:
        return False
    if value[0] != current[0]:
        return value[0] != "None" or _is_plain(current) or current[0] in ("part", "tensor")
    if value[0] == "set":
        return not value[1] <= current[1]
    if value[0] == "collection":
        (keys, items, owner), (current_keys, current_items, current_owner) = value[1], current[1]
        if keys != current_keys:
            return owner != current_owner and _is_plain(value) and _is_plain(current)
        return any(map(_is_new, items, current_items))
    return value != current


def _is_plain(value: tuple[str, Any] | None) -> bool:
    """Returns whether `_comparable` gave a number, a text, an array or a collection of these."""
    if value is None or value[0] in ("part", "tensor"):
        return False
    return value[0] != "collection" or all(map(_is_plain, value[1][1]))
