"""Derived classes that keep the name of the user's class, so that models are saved as before.

Only objects that exist get such a class. What the class makes, such as by `from_config`, is an
object of the user's class.

| what | private name | upstream | can go when |
|---|---|---|---|
| `derived_class` | `object_registration.GLOBAL_CUSTOM_NAMES` | none | an object can tell under which name it is saved |
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.saving import object_registration

_derived: dict[tuple[type, ...], type] = {}
_original: dict[type, type] = {}


def derived_class(original: type, bases: tuple[type, ...]) -> type:
    """Returns a class with these bases and with the name, module and docstring of `original`.

    The same bases give the same class each time.
    """
    if bases not in _derived:
        names = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__new__": lambda cls, *args, **kwargs: original(*args, **kwargs),
        }
        derived = _derived[bases] = type(original.__name__, bases, names)
        _original[derived] = original
        # An object of a class that the user has registered may be saved inside another object.
        registered = keras.saving.get_registered_name(original)
        object_registration.GLOBAL_CUSTOM_NAMES[derived] = registered
    return _derived[bases]


@contextlib.contextmanager
def original_classes(*objects: Any) -> Iterator[None]:
    """Gives objects back their original classes inside the context.

    Keras recognizes its public classes by identity when it saves an object. So an object that is
    saved inside the context is saved as by plain Keras.

    Args:
        *objects: models, optimizers or other objects. Those without a derived class stay as they
            are.
    """
    changed: list[tuple[Any, type]] = []
    for instance in objects:
        while (original := _original.get(type(instance))) is not None:
            changed.append((instance, type(instance)))
            object.__setattr__(instance, "__class__", original)
    try:
        yield
    finally:
        for instance, derived in reversed(changed):
            object.__setattr__(instance, "__class__", derived)
