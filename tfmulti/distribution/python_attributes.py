"""The numbers and texts that objects of a model hold as Python attributes.

The Python code of a step may change them, as `self.steps += 1` does. One device runs this code once
for each eager step, or once for each trace. Every replica of a process runs it, and so does each
pass of a step. So each run begins with the values that were there before the step, and a replica
finds its own values again after it has waited for the others.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

# The numbers that the classes of these packages have are not the user's.
_LIBRARIES = ("keras.", "tensorflow.", "tfmulti.", "builtins")
_OF_PYTHON = sys.stdlib_module_names
# Objects, each with its attributes that are numbers, texts or Booleans. Booleans are not restored,
# but show which object has initialized itself.
Attributes = Sequence[tuple[Any, dict[str, Any]]]


def read(objects: Iterable[Any]) -> Attributes:
    """Returns the numbers and texts of objects.

    An object whose own `build` has not run is left out, because `build` may set its numbers.
    """
    return [(owner, _numbers_of(owner)) for owner in objects if not _is_to_be_built(owner)]


def classes_of_user(cls: type) -> tuple[type, ...]:
    """Returns those of a class and the classes that it inherits from that no library defines."""
    # A class of an extension in C may have another `__module__` than a text.
    return tuple(c for c in cls.__mro__ if not str(c.__module__).startswith(_LIBRARIES))


def slots_of(owner: Any) -> dict[str, Any]:
    """Returns the slots that the `__slots__` of the user's classes give an object, by name."""
    found: dict[str, Any] = {}
    for cls in classes_of_user(type(owner))[::-1]:
        if "__slots__" in vars(cls) and cls.__module__.partition(".")[0] not in _OF_PYTHON:
            members = vars(cls).items()
            found |= {n: m for n, m in members if isinstance(m, types.MemberDescriptorType)}
    return found


def values_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes that an object itself holds, also those in `__slots__`.

    Weak proxies are left out, since nothing can be asked of one whose object is gone.
    """
    values = {}
    for name, slot in slots_of(owner).items():
        # A slot without a value raises AttributeError.
        with contextlib.suppress(AttributeError):
            values[name] = slot.__get__(owner)
    if type(owner).__dictoffset__ != 0:
        values |= vars(owner)
    return {n: v for n, v in values.items() if type(v) not in weakref.ProxyTypes}


def set_value(owner: Any, name: str, value: Any) -> None:
    """Gives an object an attribute of `values_of` without running code of its class."""
    slot = slots_of(owner).get(name)
    if slot is not None:
        slot.__set__(owner, value)
    else:
        vars(owner)[name] = value


def values_of_classes(cls: type) -> dict[str, Any]:
    """Returns the attributes that the user's classes give a class, without special ones."""
    pairs = (item for part in classes_of_user(cls)[::-1] for item in vars(part).items())
    return {name: value for name, value in pairs if not name.startswith("__")}


def all_values_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes that an object has by itself or by the user's classes."""
    return values_of_classes(type(owner)) | values_of(owner)


def _numbers_of(owner: Any) -> dict[str, Any]:
    """Returns the numbers and texts among `all_values_of`, without special attributes."""
    values, kinds = all_values_of(owner), (int, float, str)
    return {
        name: value
        for name, value in values.items()
        if issubclass(type(value), kinds) and not name.startswith("__")
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
        set_value(owner, name, value)


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


def first_switch(attributes: Attributes) -> str | None:
    """Returns the first object that has switched a Boolean, and its attribute, or None."""
    for owner, before in attributes:
        name = _switched(owner, before)
        if name is not None:
            return f"{type(owner).__name__}.{name}"
    return None


def _changes(attributes: Attributes) -> Iterator[tuple[Any, str, Any]]:
    """Yields the owner, the name and the old value of each number and text that has changed."""
    for owner, before in attributes:
        if _switched(owner, before) is not None:
            continue
        now = values_of(owner)
        for name, value in before.items():
            if _is_other(value, now.get(name)):
                yield owner, name, value


def _is_other(value: Any, current: Any) -> bool:
    """Returns whether a number or text has become another one."""
    are_numbers = _is_number(value) and _is_number(current)
    are_texts = isinstance(value, str) and isinstance(current, str)
    if not (are_numbers or are_texts):
        return False
    is_nan = current != current and value != value
    return current != value and not is_nan


def _is_switched(value: Any, current: Any) -> bool:
    """Returns whether a Boolean has become the other one."""
    return isinstance(value, bool) and isinstance(current, bool) and value != current


def _switched(owner: Any, before: dict[str, Any]) -> str | None:
    """Returns the first Boolean that the user's code has changed, or None."""
    now = values_of(owner)
    for name, value in before.items():
        if _is_switched(value, now.get(name)) and name not in attributes_of_keras():
            return name
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def attributes_of_keras() -> frozenset[str]:
    """Returns the names of the attributes that Keras gives models and layers."""
    return frozenset(vars(keras.Model(name="any"))) | {"stop_training"}
