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
import random
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.python_attributes import (
    attributes_of_keras,
    classes_of_user,
    numbers_of,
    values_of,
)
from tfmulti.training.state import relocation
from tfmulti.training.state.user_lines import is_module_of_user

# The methods by which a step begins to run the code of a model, a layer, a loss or a metric.
_OF_STEPS = frozenset(
    [
        "__call__",
        "call",
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
# Of a collection with more entries, or an array with more numbers, some are compared, which are
# spread evenly.
_MOST_ENTRIES = 1000
_MOST_NUMBERS = 100_000
_ABSENT = ("None", None)
_COLLECTIONS = ("set", "collection")
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


def read(found: relocation.State, step: str) -> list[Kept]:
    """Returns the values that a step reads if it is traced now, for `first_new_value`.

    Args:
        found: what `relocation.find` found from the model.
        step: such as `train_step`.
    """
    functions = list(_functions_of(step, found))
    named = _named_by(functions)
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


def of_types(values: Sequence[Kept], types_: tuple[type, ...]) -> dict[str, Any]:
    """Returns those of the values that are objects of some types, by their names in words."""
    found = ((words, read_now().items()) for read_now, words, _ in values)
    pairs = ((words(name), value) for words, items in found for name, value in items)
    return {name.rstrip(","): value for name, value in pairs if isinstance(value, types_)}


def names_generator(found: relocation.State, step: str) -> bool:
    """Returns whether a step may draw from Python's generator, as far as names tell."""
    functions = list(_functions_of(step, found))
    outside = (value for function in functions for value in _outside(function).values())
    # A function that the user has imported from `random` is a method of the generator.
    methods = (value for value in outside if isinstance(value, _FUNCTIONS))
    generator = random.random.__self__  # type: ignore[attr-defined]
    is_method = any(getattr(method, "__self__", None) is generator for method in methods)
    return is_method or "random" in _named_by(functions)


def changed_collections(values: Sequence[Kept]) -> list[Any]:
    """Returns the collections that have changed since `read`, or that were made since then."""
    found = []
    for read_now, _, before in values:
        now = read_now()
        for name, value in before.items():
            current = _comparable(now.get(name))
            if current is not None and current[0] in _COLLECTIONS and current != value:
                found.append(now[name])
    return found


def first_new_value(values: Sequence[Kept], collecting: Sequence[Any]) -> str | None:
    """Returns the first value that is another one since `read`, or None.

    A change of a layer's `trainable` counts, too.

    Args:
        values: what `read` returned.
        collecting: the collections that are changed by code that runs while a step is traced. They
            may change at any time.

    Returns:
        The value in words, such as `Dropout.rate of 'dropout_1'`.
    """
    ignored = set(map(id, collecting))
    for read_now, words, before in values:
        now = read_now()
        for name in {**before, **now}:
            is_ignored = id(now.get(name)) in ignored
            if not is_ignored and _is_new(before.get(name, _ABSENT), _comparable(now.get(name))):
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
    values = {**numbers_of(owner), **values_of(owner)}
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
    functions, seen, to_read = [function], set(), list(values.items())
    while to_read:
        name, value = to_read.pop()
        attributes = {} if id(value) in seen else _attributes_of_user(value)
        seen.add(id(value))
        if attributes:
            functions = list(_with_methods(functions, _methods_of(value)))
            named = _named_by(functions)
            found = [(f"{name}.{a}", v) for a, v in attributes.items() if a in named]
            values.update(found)
            to_read += found
    return values


def _named_by(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    """Returns the globals and attributes that functions name."""
    return frozenset[str]().union(*(relocation.names_in(f.__code__) for f in functions))


def _attributes_of_user(value: Any) -> dict[str, Any]:
    """Returns the attributes of a module, a class or an object, if it is the user's own."""
    if isinstance(value, types.ModuleType):
        return vars(value) if is_module_of_user(value) else {}
    if isinstance(value, (*_FUNCTIONS, *_PARTS_OF_KERAS)) or not relocation.has_attributes(value):
        return {}
    own = classes_of_user(value if isinstance(value, type) else type(value))
    of_classes = {name: v for cls in own[::-1] for name, v in vars(cls).items()}
    return {**of_classes, **values_of(value)} if own else {}


def _functions_of(step: str, found: relocation.State) -> Iterator[types.FunctionType]:
    """Yields the user's functions that a step may call, as far as names tell.

    A step may call its own method, those in `_OF_STEPS`, functions that are no methods, and the
    methods that one of them names.
    """
    methods = _methods_of(*{type(owner): owner for owner in found.objects}.values())
    of_classes = {function for of_name in methods.values() for function in of_name}
    begin = [function for function in found.functions if function not in of_classes]
    for name in _OF_STEPS | {step}:
        begin += methods.pop(name, [])
    return _with_methods(begin, methods)


def _methods_of(*owners: Any) -> dict[str, list[types.FunctionType]]:
    """Returns the methods and properties of the user's own that some objects have, by name."""
    methods: dict[str, list[types.FunctionType]] = {}
    for owner in owners:
        for name, function in relocation.methods_of_user(owner):
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function)
    return methods


def _with_methods(
    functions: Iterable[types.FunctionType], methods: dict[str, list[types.FunctionType]]
) -> Iterator[types.FunctionType]:
    """Yields functions, and the methods that one of them or of these methods names."""
    to_read = list(functions)
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
        if value.dtype.kind in "OUS":
            return _comparable(value.tolist(), depth)
        numbers = value.reshape(-1)[:: 1 + value.size // _MOST_NUMBERS]
        return "array", (value.dtype, value.shape, zlib.crc32(numbers.tobytes()))
    # A table of pandas or of another library.
    if hasattr(type(value), "to_numpy"):
        return _comparable(value.to_numpy(), depth) if len(value) <= _MOST_NUMBERS else None
    if isinstance(value, (set, frozenset)):
        plain = all(isinstance(item, (int, float, str)) for item in value)
        return ("set", frozenset(value)) if plain and len(value) <= _MOST_NUMBERS else None
    if isinstance(value, (list, tuple, dict, collections.deque)):
        if depth == _DEEPEST:
            return None
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        some = pairs[:: 1 + len(pairs) // _MOST_ENTRIES]
        keys = [key if isinstance(key, (str, int, float)) else _Same(key) for key, _ in some]
        items = [_comparable(item, depth + 1) for _, item in some]
        return "collection", (len(pairs), keys, items)
    if isinstance(value, tf.Tensor):
        return None if tf.is_symbolic_tensor(value) else ("tensor", _Same(value))
    is_object = isinstance(value, _PARTS_OF_KERAS) or classes_of_user(type(value))
    return ("part", _Same(value)) if is_object else None


def _is_new(value: tuple[str, Any] | None, current: tuple[str, Any] | None) -> bool:
    """Returns whether a value that `_comparable` gave has become another one."""
    if value is None or current is None:
        return False
    if value[0] == current[0] == "collection":
        (*keys, items), (*current_keys, current_items) = value[1], current[1]
        return keys != current_keys or any(map(_is_new, items, current_items))
    return value != current
