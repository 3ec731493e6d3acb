"""The numbers and texts that objects of a model hold as Python attributes.

The Python code of a step may change them, as `self.steps += 1` does. One device runs this code once
for each eager step, or once for each trace. Every replica of a process runs it, too. So each
replica begins with the values that were there before the step, and finds its own values again after
it has waited for the other replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras

# Objects, each with its attributes that are numbers or texts.
Attributes = list[tuple[Any, dict[str, Any]]]


def read(objects: Iterable[Any]) -> Attributes:
    """Returns the numbers and texts of objects, without those that a `build` may yet set."""
    kinds = (int, float, str)
    return [
        (owner, {name: v for name, v in vars(owner).items() if isinstance(v, kinds)})
        for owner in objects
        if not _is_to_be_built(owner)
    ]


def _is_to_be_built(owner: Any) -> bool:
    """Returns whether an object has a `build` of the user's own that has not run yet."""
    build = getattr(type(owner), "build", None)
    is_own = build is not None and not build.__module__.startswith("keras.")
    return is_own and not getattr(owner, "built", True)


def restore(attributes: Attributes) -> None:
    """Gives objects the numbers and texts that `read` returned.

    Booleans keep their new value: a layer that was built stays built.
    """
    for owner, name, value in _changes(attributes):
        if not isinstance(value, bool):
            vars(owner)[name] = value


def first_change(attributes: Attributes, *, of_booleans: bool = False) -> str | None:
    """Returns the first attribute that has changed since `read`, as `Critic.steps`, or None.

    Args:
        attributes: what `read` returned.
        of_booleans: whether to look at Booleans, without those of Keras such as `built`, or at
            numbers and texts.
    """
    for owner, name, value in _changes(attributes):
        if isinstance(value, bool) == of_booleans and not (of_booleans and name in _of_keras()):
            return f"{type(owner).__name__}.{name}"
    return None


@functools.cache
def _of_keras() -> frozenset[str]:
    """Returns the names of the attributes that every model has."""
    return frozenset(vars(keras.Model(name="any")))


def _changes(attributes: Attributes) -> Iterable[tuple[Any, str, Any]]:
    """Yields the owner, the name and the old value of each attribute that has changed."""
    for owner, before in attributes:
        for name, value in before.items():
            current = vars(owner).get(name)
            if type(current) is type(value) and current != value:
                yield owner, name, value
