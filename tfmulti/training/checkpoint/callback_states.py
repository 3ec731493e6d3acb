"""Captures what callbacks have learned since training began, and restores it.

A callback may have `get_state()` and `set_state(state)`. Then these give and take its state. Of any
other callback the state is its attributes that have changed since `fit` called `on_train_begin`.

A checkpoint is a file that anyone may have written. So `CallbackStates.restore` sets an attribute
only under these rules:

- The callback had the attribute when training began.
- The saved value has the same kind as the value of that time, or one of the two is None.
- Neither of the two values holds a path. A text is taken for a path if it has a slash, or if the
  attribute's name has a word such as `path` or `file`.

`CallbackStates.capture` leaves out what `restore` would not set.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from tfmulti.training.checkpoint.serialization import NotPlainError, copied

Tree = dict[str, Any]

# An attribute with such a name holds the place of a file or of a server.
_PATHS = re.compile(r"path|file|folder|directory|url|(^|_)dir(_|$)", re.IGNORECASE)

# ProgbarLogger's attributes belong to the terminal, and LambdaCallback's are functions.
_STATELESS = (keras.callbacks.ProgbarLogger, keras.callbacks.LambdaCallback)

# `fit` sets `params` itself. Of `min_delta` Keras may change the sign when the callback is first
# used, although it is a setting.
_SETTINGS = ("params", "min_delta")


class CallbackStates:
    """The states of callbacks, as they have changed since this object was made.

    Attributes with plain values and arrays are captured if they have changed, such as the best
    weights of EarlyStopping. Settings do not change, so they are not captured. An attribute of a
    class that derives from a plain one, such as a defaultdict or an IntEnum, keeps its class.

    Args:
        callbacks: the callbacks of `fit`, after it has called `on_train_begin`.

    Attributes:
        left_out: one sentence for each state that the last `capture` left out, and for each that
            `restore` has left out since.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        self._callbacks = _named(callbacks)
        self._before = {name: _attributes(c) for name, c in self._callbacks.items()}
        self.left_out: list[str] = []

    def capture(self) -> Tree:
        """Returns the state of each callback, by the callback's name."""
        self.left_out = []
        return {
            name: self._given_state(c) if _has_own_state(c) else self._changes(name, c)
            for name, c in self._callbacks.items()
        }

    def restore(self, saved: Tree) -> None:
        """Restores the states of the callbacks that both runs have."""
        for name, callback in self._callbacks.items():
            state = saved.get(name)
            if state is None:
                continue
            if _has_own_state(callback):
                callback.set_state(state)
                continue
            before = self._before[name]
            for key, value in state.items():
                reason = _reason_to_refuse(before, key, value)
                if reason is None:
                    setattr(callback, key, _like(vars(callback)[key], value))
                else:
                    self._leave_out(f"attribute {key!r}", callback, reason)

    def _given_state(self, callback: Any) -> Any:
        """Returns a copy of what a callback's `get_state` returns, or None if it is not plain."""
        try:
            return copied(callback.get_state(), "get_state()")
        except NotPlainError as error:
            self._leave_out("state", callback, error)
            return None

    def _changes(self, name: str, callback: keras.callbacks.Callback) -> Tree:
        """Returns the attributes of a callback that have changed."""
        before, changes = self._before[name], {}
        is_known = type(callback).__module__.startswith(("keras.", "tfmulti."))
        for key, value in _attributes(callback).items():
            if key in before and _same(before[key], value):
                continue
            reason = _reason_to_refuse(before, key, value)
            if reason is None:
                changes[key] = value
            # Attributes of Keras' callbacks that are not plain are writers and functions, which
            # belong to the process and not to the run.
            elif not is_known:
                self._leave_out(f"attribute {key!r}", callback, reason)
        return changes

    def _leave_out(self, part: str, callback: Any, reason: object) -> None:
        """Adds a sentence to `left_out` that says why a part of a state is left out."""
        self.left_out.append(
            f"the {part} of the callback {type(callback).__qualname__} is not in the checkpoints, "
            f"since {reason}; a resumed run starts it from its initial value. Give the "
            "callback get_state() and set_state(state), of plain values and arrays."
        )


def _reason_to_refuse(before: Tree, key: str, value: Any) -> str | None:
    """Returns why an attribute must not get a value, or None if it may."""
    if isinstance(value, _NotPlain):
        return str(value.error)
    if key not in before:
        return "it was not there when training began"
    if isinstance(before[key], _NotPlain):
        return str(before[key].error)
    texts = [*_texts_in(before[key]), *_texts_in(value)]
    if texts and (_PATHS.search(key) or any(_looks_like_a_path(text) for text in texts)):
        return "it is a path, or holds one"
    if value is None or before[key] is None or _kind(before[key]) is _kind(value):
        return None
    return f"it is a {_kind(value).__name__}, and was a {_kind(before[key]).__name__}"


def _texts_in(value: Any) -> Iterator[str | bytes]:
    """Yields all texts in a plain value, without the keys of dicts."""
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "US":
            yield from value.ravel().tolist()
    else:
        for item in _items_of(value):
            yield from _texts_in(item)


def _items_of(value: Any) -> Iterable[Any]:
    """Returns the items of a container, or nothing for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set, frozenset, deque)) else ()


def _looks_like_a_path(text: str | bytes) -> bool:
    """Returns whether a text has a character that separates folders, or a null character."""
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
    return any(sign in decoded for sign in ("/", "\\", "\0"))


def _kind(value: Any) -> type:
    """Returns the type of a plain value; for a number of any type but bool it is float."""
    if isinstance(value, (bool, np.bool_)):
        return bool
    return float if isinstance(value, (int, float, np.number)) else type(value)


def _has_own_state(callback: Any) -> bool:
    """Returns whether a callback gives and takes its own state."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


class _NotPlain:
    """Stands for an attribute whose value is not plain.

    `objects` has the ids of the value and of its items. The attribute has not changed as long as
    these ids are the same.
    """

    def __init__(self, value: Any, error: NotPlainError) -> None:
        self.error, self.objects = error, [id(value), *map(id, _items_of(value))]


def _named(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns callbacks by names such as `EarlyStopping 1`: the class and a number within it."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, _STATELESS):
            continue
        name, count = type(callback).__qualname__, 1
        while f"{name} {count}" in named:
            count += 1
        named[f"{name} {count}"] = callback
    return named


def _attributes(callback: Any) -> Tree:
    """Returns copies of a callback's attributes, with an `_NotPlain` for each that is not plain."""
    attributes: Tree = {}
    for key, value in vars(callback).items():
        if key not in _SETTINGS:
            try:
                attributes[key] = copied(_base(value), key)
            except NotPlainError as error:
                attributes[key] = _NotPlain(value, error)
    return attributes


def _base(value: Any) -> Any:
    """Returns the plain value that a value of a derived class holds, or any other value itself."""
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, (bool, np.generic)):
        return value
    if isinstance(value, str):
        # str() of an Enum is the name of its member, and not its value.
        return str.__str__(value)
    bases: tuple[Any, ...] = (dict, list, int, float)
    return next((base(value) for base in bases if isinstance(value, base)), value)


def _like(current: Any, saved: Any) -> Any:
    """Returns a saved value in the class of the attribute's current value.

    If the current value is a container, it is filled with the saved items and returned.
    """
    if type(current) is type(saved) or current is None:
        return saved
    if isinstance(current, dict) and isinstance(saved, dict):
        current.clear()
        current.update(saved)
        return current
    if isinstance(current, (list, deque)) and isinstance(saved, list):
        current.clear()
        current.extend(saved)
        return current
    for base in (int, float, str):
        derived = isinstance(current, base) and type(current) not in (bool, base)
        if derived and type(saved) is base and not isinstance(current, np.generic):
            return type(current)(saved)
    return saved


def _same(left: Any, right: Any) -> bool:
    """Returns whether two values of `_attributes` have the same type and are equal."""
    if isinstance(left, _NotPlain) or isinstance(right, _NotPlain):
        are_both = isinstance(left, _NotPlain) and isinstance(right, _NotPlain)
        return are_both and left.objects == right.objects
    return type(left) is type(right) and _same_values(left, right)


def _same_values(left: Any, right: Any) -> bool:
    """Returns whether two plain values of one type are equal."""
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)
