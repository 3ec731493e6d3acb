"""Access to pyarrow, which reads tables."""

from __future__ import annotations

import importlib
from typing import Any

from tfmulti.errors import DataError


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
