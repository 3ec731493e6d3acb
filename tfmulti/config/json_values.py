"""Parses JSON from files and sockets strictly, with one kind of error and with type checks."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        json.JSONDecodeError: the text is not JSON or not UTF-8, nests brackets more deeply than
            Python can follow, or has a number with more digits than Python accepts.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        reason = "brackets are nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except ValueError as error:
        reason = str(error).partition(";")[0]
    raise json.JSONDecodeError(reason, "", 0)


def build(kind: type[T], values: Any) -> T:
    """Returns an instance of a dataclass from the values of a JSON object.

    Each value must have the type of its field, and so must each value within a dict, a list or a
    tuple. A float field also accepts an integer below 2**53, which a float holds exactly. JSON has
    no tuples, so a tuple is a list there.

    Args:
        kind: the dataclass.
        values: the JSON object, as `parse` returns it.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Place:
    ...     host: str
    ...     port: int | None = None
    >>> build(Place, {"host": "h"})
    Place(host='h', port=None)

    Raises:
        ValueError: a field is missing or unknown, has another type, or is not a number (NaN). A
            NaN may stand within a dict, a list or a tuple, as a metric may be one.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is not a JSON object")
    hints = typing.get_type_hints(kind)
    required = {
        field.name
        for field in dataclasses.fields(typing.cast(Any, kind))
        if field.default is field.default_factory is dataclasses.MISSING
    }
    if not required <= values.keys() <= hints.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(map(repr, values))[:200]}")
    for name, value in values.items():
        if value != value:
            raise ValueError(f"{name} is not a number")
    return kind(**{name: _as(hints[name], name, value) for name, value in values.items()})


def _as(hint: Any, name: str, value: Any) -> Any:
    """Returns a value as the type that a field has, or raises ValueError."""
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        (hint,) = (kind for kind in hint.__args__ if kind is not types.NoneType)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value)
    if hint is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is not Any and type(value) is not (list if origin is tuple else origin):
        raise ValueError(f"{name} is of type {type(value).__name__}")
    if origin is dict and inner:
        return {key: _as(inner[1], name, item) for key, item in value.items()}
    if origin in (list, tuple) and inner:
        return origin(_as(inner[0], name, item) for item in value)
    return value
