"""What callbacks have learned since training began, out of them and back into them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfmulti.training.checkpoint.serialization import NotPlainError, copied

Tree = dict[str, Any]

# In names of attributes that hold where something is written or read.
_PATHS = re.compile(r"path|file|folder|directory|url|(^|_)dir(_|$)", re.IGNORECASE)

# Their attributes are the terminal's, or are set anew by what they watch.
_STATELESS = (keras.callbacks.ProgbarLogger, keras.callbacks.LambdaCallback)

# Given anew by `fit`; and Keras turns a `min_delta`'s sign when the callback is first used.
_SETTINGS = ("model", "_model", "params", "_params", "min_delta")


class CallbackStates:
    """What callbacks have learned since training began.

    A callback that has `get_state()` and `set_state(state)` speaks for itself. Of others it is
    the attributes of plain values and arrays that have changed since `fit` called
    `on_train_begin`: EarlyStopping's patience and best weights, ModelCheckpoint's best, the
    counts of a callback of one's own; not their settings. An attribute of a class derived from
    a plain one (a defaultdict, a deque, an IntEnum) keeps its class.

    A checkpoint is a file that anyone may have written. So `restore` sets an attribute only where
    the callback here had it when training began, to a value of the same kind, and never a path.
    What it would not set is not captured.

    `left_out` says in one line each what the last `capture` or `restore` left out.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        self._callbacks = _named(callbacks)
        self._before = {name: _attributes(c) for name, c in self._callbacks.items()}
        self.left_out: list[str] = []

    def capture(self) -> Tree:
        """Returns each callback's state by its name."""
        self.left_out = []
        return {
            name: self._told(c) if _speaks(c) else self._changes(name, c)
            for name, c in self._callbacks.items()
        }

    def restore(self, saved: Tree) -> None:
        """Gives the callbacks that are here their states."""
        for name, callback in self._callbacks.items():
            state = saved.get(name)
            if state is None:
                continue
            if _speaks(callback):
                callback.set_state(state)
                continue
            before = self._before[name]
            for key, value in state.items():
                reason = _reason_to_refuse(before, key, value)
                if reason is None:
                    setattr(callback, key, _like(vars(callback)[key], value))
                else:
                    self._leave_out(f"attribute {key!r}", callback, reason)

    def _told(self, callback: Any) -> Any:
        try:
            return copied(callback.get_state(), "get_state()")
        except NotPlainError as error:
            self._leave_out("state", callback, error)
            return None

    def _changes(self, name: str, callback: keras.callbacks.Callback) -> Tree:
        before, changes = self._before[name], {}
        known = type(callback).__module__.startswith(("keras.", "tfmulti."))
        for key, value in _attributes(callback).items():
            if key in before and _same(before[key], value):
                continue
            reason = _reason_to_refuse(before, key, value)
            if reason is None:
                changes[key] = value
            elif not known:  # Keras' own keep writers and functions, which are the process'
                self._leave_out(f"attribute {key!r}", callback, reason)
        return changes

    def _leave_out(self, what: str, callback: Any, reason: object) -> None:
        self.left_out.append(
            f"the {what} of the callback {type(callback).__qualname__} is not in the checkpoints, "
            f"since {reason}; a resumed run begins it anew. Give the callback get_state() and "
            "set_state(state), of plain values and arrays."
        )


def _reason_to_refuse(before: Tree, key: str, value: Any) -> str | None:
    """Returns why an attribute is not set to a value, beside those that it had in the beginning."""
    if isinstance(value, _Other):
        return str(value.error)
    if key not in before:
        return "it was not there when training began"
    if isinstance(before[key], _Other):
        return str(before[key].error)
    texts = [*_texts_in(before[key]), *_texts_in(value)]
    if texts and (_PATHS.search(key) or any(_looks_like_a_path(text) for text in texts)):
        return "it is a path, or holds one"
    if value is None or before[key] is None or _kind(before[key]) is _kind(value):
        return None
    return f"it is a {_kind(value).__name__}, and was a {_kind(before[key]).__name__}"


def _texts_in(value: Any) -> Iterator[str | bytes]:
    """Yields the texts of a plain value, but those by which a dict names its values."""
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts_in(each)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for each in value:
            yield from _texts_in(each)


def _looks_like_a_path(text: str | bytes) -> bool:
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    return any(sign in whole for sign in ("/", "\\", "\0"))


def _kind(value: Any) -> type:
    """Returns what a plain value is; a number of any type is a float."""
    if isinstance(value, (bool, np.bool_)):
        return bool
    return float if isinstance(value, (int, float, np.number)) else type(value)


def _speaks(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


class _Other:
    """Stands for an attribute that is not plain: equal while it is the same object, of the same."""

    def __init__(self, value: Any, error: NotPlainError) -> None:
        self.error = error
        parts = value.values() if isinstance(value, dict) else value
        held = isinstance(value, (dict, list, tuple, set, frozenset, deque))
        self.objects = [id(value), *(map(id, parts) if held else [])]


def _named(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, _STATELESS):
            continue
        name, count = type(callback).__qualname__, 1
        while f"{name} {count}" in found:
            count += 1
        found[f"{name} {count}"] = callback
    return found


def _attributes(callback: Any) -> Tree:
    """Returns copies of a callback's attributes, and of what is not plain an `_Other`."""
    found: Tree = {}
    for key, value in vars(callback).items():
        if key not in _SETTINGS:
            try:
                found[key] = copied(_base(value), key)
            except NotPlainError as error:
                found[key] = _Other(value, error)
    return found


def _base(value: Any) -> Any:
    """Returns the plain value that one of a derived class holds; others as they are."""
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, (bool, np.generic)):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # str() of an Enum is its name
    bases: tuple[Any, ...] = (dict, list, int, float)
    return next((base(value) for base in bases if isinstance(value, base)), value)


def _like(current: Any, saved: Any) -> Any:
    """Returns a saved value as one of the class that the attribute has here."""
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
    if isinstance(left, _Other) or isinstance(right, _Other):
        both = isinstance(left, _Other) and isinstance(right, _Other)
        return both and left.objects == right.objects
    return type(left) is type(right) and _same_values(left, right)


def _same_values(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)
