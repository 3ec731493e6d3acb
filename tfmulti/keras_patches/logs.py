"""Access to the log of TensorFlow's C++ code.

| what | private name | upstream | can go when |
|---|---|---|---|
| `errors_only` | `absl::MinLogLevel` and `SetMinLogLevel` in TensorFlow's library | none | TensorFlow's log level can be changed after its import |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ERROR = 2
# The names of the functions hold the version of Abseil: first the one of TensorFlow 2.21.
_ABSEIL = ("20250814",)

_lock = threading.Lock()
# How many contexts of `errors_only` are open, in all threads, and the level before the first one.
_open, _before = 0, 0


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    """Returns the functions that tell and set the level, or None if TensorFlow has none."""
    library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")))
    for version in _ABSEIL:
        name = f"_ZN4absl12lts_{version}"
        with contextlib.suppress(AttributeError):
            return (
                getattr(library, f"{name}11MinLogLevelEv"),
                getattr(library, f"{name}14SetMinLogLevelENS0_18LogSeverityAtLeastE"),
            )
    return None


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Lets TensorFlow's C++ code log nothing but errors inside the context, in all threads.

    The allocator of TensorFlow writes hundreds of warnings when the memory is used up. The function
    does nothing if the user has chosen a level (TF_CPP_MIN_LOG_LEVEL), or if this TensorFlow has no
    such functions.
    """
    global _open, _before
    functions = None if LEVEL in os.environ else _functions()
    if functions is None:
        yield
        return
    level, set_level = functions
    with _lock:
        if not _open:
            _before = level()
            set_level(max(_before, _ERROR))
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                set_level(_before)
