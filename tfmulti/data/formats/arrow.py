"""pyarrow, which reads tables, and which of their rows it could not read."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from tfmulti.errors import DataError


class BadRows(NamedTuple):
    """Rows of a file that are left out: the first one's number, from 1, and how many they are.

    `place` names them, such as `row 3`, and `reason` is a sentence.
    """

    first: int
    rows: int
    place: str
    reason: str


def arrow(module: str = "pyarrow") -> Any:
    """Returns pyarrow, or a module of it.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            "reading tables needs pyarrow, which is not installed. "
            "Install it: pip install 'tfmulti[tables]'."
        ) from None


def reason_of(error: Exception) -> str:
    """Returns what pyarrow says of a file in one line, without a stop."""
    words = " ".join(str(getattr(error, "strerror", None) or error).split())
    return words.rstrip(".") or type(error).__name__
