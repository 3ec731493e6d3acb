"""Access to pyarrow, which reads tables, and a description of the rows that it cannot read."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from tfmulti.errors import DataError


class BadRows(NamedTuple):
    """Neighbouring rows of a file that are left out together.

    Attributes:
        first: the number of the first of them, from 1.
        rows: how many they are.
        place: their name for messages, such as `row 3`.
        reason: why they are left out, in one sentence.
    """

    first: int
    rows: int
    place: str
    reason: str


def arrow(module: str = "pyarrow") -> Any:
    """Returns pyarrow or one of its modules.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            "reading tables needs pyarrow, which is not installed. "
            "Install it: pip install 'tfmulti[tables]'."
        ) from None


def reason_of(error: Exception) -> str:
    """Returns what pyarrow's error says in one line, without a full stop."""
    words = " ".join(str(getattr(error, "strerror", None) or error).split())
    return words.rstrip(".") or type(error).__name__
