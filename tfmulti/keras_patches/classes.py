"""Classes derived from a user's class, which keep its name so that models are saved as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_derived: dict[tuple[type, ...], type] = {}
_original: dict[type, type] = {}


def derived_class(original: type, bases: tuple[type, ...]) -> type:
    """Returns a class over `bases` that bears the name and module of `original`."""
    if bases not in _derived:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _derived[bases] = type(original.__name__, bases, names | {"__doc__": original.__doc__})
        _original[_derived[bases]] = original
    return _derived[bases]


@contextlib.contextmanager
def original_classes(*things: Any) -> Iterator[None]:
    """Inside, the objects have the classes that they had before tfmulti derived from them.

    Keras writes public classes by identity; what is saved inside is as plain Keras saves it.
    """
    changed: list[tuple[Any, type]] = []
    for thing in things:
        while (original := _original.get(type(thing))) is not None:
            changed.append((thing, type(thing)))
            object.__setattr__(thing, "__class__", original)
    try:
        yield
    finally:
        for thing, derived in reversed(changed):
            object.__setattr__(thing, "__class__", derived)
