"""The numbers and texts that objects of a model hold as Python attributes.

The Python code of a step may change them, as `self.steps += 1` does. One device runs this code once
for each eager step, or once for each trace. Every replica of a process runs it, too. So each
replica begins with the values that were there before the step, and finds its own values again after
it has waited for the other replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
        vars(owner)[name] = value


def first_change(attributes: Attributes) -> str | None:
    """Returns the first attribute that has changed since `read`, as `Critic.steps`, or None."""
    changes = ((owner, name) for owner, name, _ in _changes(attributes))
    return next((f"{type(owner).__name__}.{name}" for owner, name in changes), None)


def _changes(attributes: Attributes) -> Iterable[tuple[Any, str, Any]]:
    """Yields the owner, the name and the old value of each attribute that has changed."""
    for owner, before in attributes:
        for name, value in before.items():
            current = vars(owner).get(name)
            if type(current) is type(value) and current != value and not isinstance(value, bool):
                yield owner, name, value
