"""The numbers and texts that objects of a model hold as Python attributes.

The Python code of a step may change them, as `self.steps += 1` does. One device runs this code once
for each eager step, or once for each trace. Every replica of a process runs it, and so does each
pass of a step. So each run begins with the values that were there before the step, and a replica
finds its own values again after it has waited for the others.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# The numbers that the classes of these packages have are not the user's.
_LIBRARIES = ("keras.", "tensorflow.", "tfmulti.", "builtins")
# Objects, each with its attributes that are numbers, texts or Booleans. Booleans are not restored,
# but show which object has initialized itself.
Attributes = Sequence[tuple[Any, dict[str, Any]]]


def read(objects: Iterable[Any]) -> Attributes:
    """Returns the numbers and texts of objects.

    An object whose own `build` has not run is left out, because `build` may set its numbers.
    """
    return [(owner, _numbers_of(owner)) for owner in objects if not _is_to_be_built(owner)]


def read_for_steps(objects: Iterable[Any]) -> Attributes:
    """Returns what a compiled step may keep of objects, for `first_new_value`.

    These are numbers and texts, and the other values that a step may read: Booleans, None,
    functions, arrays and collections of the user's objects, if a method that a step may call names
    them, and settings of Keras' layers and optimizers, such as an activation.
    """
    return [(owner, {**_settings_of(owner), **_numbers_of(owner)}) for owner in objects]


def _settings_of(owner: Any) -> dict[str, Any]:
    """Returns an object's attributes that are no numbers or texts, and that a step may read."""
    own = [cls for cls in type(owner).__mro__ if not cls.__module__.startswith(_LIBRARIES)]
    named = _named_in_steps(tuple(own))
    return {
        name: _copied(value)
        for name, value in vars(owner).items()
        if name not in _of_keras()
        and (name in named if own else not name.startswith("_"))
        and _is_setting(value, is_of_user=bool(own))
    }


def _is_setting(value: Any, *, is_of_user: bool) -> bool:
    """Returns whether `_is_new` compares a value."""
    if isinstance(value, tf.Tensor):
        return not tf.is_symbolic_tensor(value)
    if isinstance(value, np.ndarray):
        return is_of_user and value.dtype.kind in "biufc" and value.size <= _MOST_ITEMS
    if isinstance(value, (list, tuple, dict)):
        return is_of_user and len(value) <= _MOST_ITEMS
    return value is None or isinstance(value, (bool, *_FUNCTIONS))


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Larger arrays and collections are data, and would take time to copy and to compare.
_MOST_ITEMS = 1000
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


@functools.cache
def _named_in_steps(classes: tuple[type, ...]) -> frozenset[str]:
    """Returns the names of attributes in the methods that a step may call.

    A step may call the methods in `_OF_STEPS`, and the methods that one of them names. If a class
    has none of `_OF_STEPS`, a step may call each of its methods.
    """
    methods: dict[str, list[types.CodeType]] = {}
    for cls in classes:
        for name, value in vars(cls).items():
            if hasattr(value, "__code__"):
                methods.setdefault(name, []).append(value.__code__)
    found: set[str] = set()
    to_read = [name for name in methods if name in _OF_STEPS] or list(methods)
    while to_read:
        codes = methods.pop(to_read.pop(), [])
        while codes:
            code = codes.pop()
            found.update(code.co_names)
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        to_read += [name for name in methods if name in found]
    return frozenset(found)


def _copied(value: Any) -> Any:
    """Returns a copy of a value that may be changed in place."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else value


def _numbers_of(owner: Any) -> dict[str, Any]:
    """Returns the numbers and texts that an object has by itself or by the user's classes."""
    own = [cls for cls in type(owner).__mro__[::-1] if not cls.__module__.startswith(_LIBRARIES)]
    values = {name: v for part in (*own, owner) for name, v in vars(part).items()}
    kinds = (int, float, str)
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, kinds) and not name.startswith("__")
    }


def _is_to_be_built(owner: Any) -> bool:
    """Returns whether an object has a `build` of the user's own that has not run yet."""
    build = getattr(type(owner), "build", None)
    is_own = callable(build) and not build.__module__.startswith("keras.")
    return is_own and not getattr(owner, "built", True)


def restore(attributes: Attributes) -> None:
    """Gives objects the numbers and texts that `read` returned.

    An object that has switched a Boolean keeps all its new values, because it may have initialized
    itself, as in `if not self.is_ready: …`.
    """
    for owner, name, value in _changes(attributes):
        vars(owner)[name] = value


@contextlib.contextmanager
def kept(objects: Iterable[Any]) -> Iterator[None]:
    """Restores the numbers and texts of objects when the context ends."""
    attributes = read(objects)
    try:
        yield
    finally:
        restore(attributes)


def first_change(attributes: Attributes) -> str | None:
    """Returns the first number or text that `restore` would change, as `Critic.steps`, or None."""
    changes = ((owner, name) for owner, name, _ in _changes(attributes))
    return next((f"{type(owner).__name__}.{name}" for owner, name in changes), None)


def _changes(attributes: Attributes) -> Iterator[tuple[Any, str, Any]]:
    """Yields the owner, the name and the old value of each number and text that has changed."""
    for owner, before in attributes:
        if _has_switched(owner, before):
            continue
        for name, value in before.items():
            if _is_other(value, vars(owner).get(name)):
                yield owner, name, value


def _is_other(value: Any, current: Any) -> bool:
    """Returns whether a number or text has become another one."""
    are_numbers = _is_number(value) and _is_number(current)
    are_texts = isinstance(value, str) and isinstance(current, str)
    if not (are_numbers or are_texts):
        return False
    is_nan = current != current and value != value
    return current != value and not is_nan


def first_new_value(attributes: Attributes) -> str | None:
    """Returns the first value that is another one since `read_for_steps`, or None.

    Args:
        attributes: what `read_for_steps` returned. A change of a layer's `trainable` counts, too.

    Returns:
        The attribute in words, such as `Dropout.rate of 'dropout_1'`.
    """
    for owner, before in attributes:
        is_own = not type(owner).__module__.startswith(_LIBRARIES)
        for name, value in before.items():
            current = vars(owner).get(name, value)
            is_trainable = name == "_trainable" and current != value
            # TensorFlow counts in an attribute how often a `tf.train.Checkpoint` was written.
            is_public = not name.startswith("_self_" if is_own else "_")
            counts = is_public and name not in _of_keras()
            if is_trainable or (counts and _is_new(value, current)):
                of = f" of {owner.name!r}" if isinstance(owner, keras.layers.Layer) else ""
                return f"{type(owner).__name__}.{name.removeprefix('_')}{of}"
    return None


def _is_new(value: Any, current: Any) -> bool:
    """Returns whether a value that `_settings_of` gave has become another one.

    Of collections the entries are compared. One that has got more entries may collect values while
    a step is traced.
    """
    if isinstance(value, np.ndarray) and isinstance(current, np.ndarray):
        is_same = value.dtype == current.dtype and value.shape == current.shape
        return not (is_same and np.array_equal(value, current, equal_nan=True))
    if isinstance(value, dict) and isinstance(current, dict):
        is_same = value.keys() == current.keys()
        return is_same and any(_is_other_entry(value[key], current[key]) for key in value)
    if isinstance(value, (list, tuple)) and isinstance(current, (list, tuple)):
        return len(value) == len(current) and any(map(_is_other_entry, value, current))
    if value is None:
        is_collection = isinstance(current, (list, tuple, dict))
        is_setting = current is not None and _is_setting(current, is_of_user=True)
        return isinstance(current, (int, float, str)) or (is_setting and not is_collection)
    if isinstance(value, _FUNCTIONS):
        return current is None or (callable(current) and current != value)
    if isinstance(value, tf.Tensor) and isinstance(current, tf.Tensor):
        return not tf.is_symbolic_tensor(current) and current is not value
    return _is_other_entry(value, current)


def _is_other_entry(value: Any, current: Any) -> bool:
    """Returns whether a number, a text or a Boolean has become another one."""
    return _is_switched(value, current) or _is_other(value, current)


def _is_switched(value: Any, current: Any) -> bool:
    """Returns whether a Boolean has become the other one."""
    return isinstance(value, bool) and isinstance(current, bool) and value != current


def _has_switched(owner: Any, before: dict[str, Any]) -> bool:
    """Returns whether the user's code has changed a Boolean."""
    for name, value in before.items():
        if _is_switched(value, vars(owner).get(name)) and name not in _of_keras():
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def _of_keras() -> frozenset[str]:
    """Returns the names of the attributes that Keras gives models and layers."""
    return frozenset(vars(keras.Model(name="any"))) | {"stop_training"}
