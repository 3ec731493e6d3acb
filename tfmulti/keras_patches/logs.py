"""Access to the log of TensorFlow's C++ code.

| what | private name | upstream | can go when |
|---|---|---|---|
| `errors_only` | `absl::MinLogLevel` and `SetMinLogLevel` in TensorFlow's library | none | TensorFlow's log level can be changed after its import |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ERROR = 2
# The names of the functions hold the version of Abseil: first the one of TensorFlow 2.21.
_ABSEIL = ("20250814",)


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Lets TensorFlow's C++ code log nothing but errors inside the context.

    It does nothing if the user has chosen a level (TF_CPP_MIN_LOG_LEVEL), or if this TensorFlow has
    no such functions.
    """
    if LEVEL in os.environ:
        yield
        return
    library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")))
    for version in _ABSEIL:
        name = f"_ZN4absl12lts_{version}"
        with contextlib.suppress(AttributeError):
            level = getattr(library, f"{name}11MinLogLevelEv")
            set_level = getattr(library, f"{name}14SetMinLogLevelENS0_18LogSeverityAtLeastE")
            break
    else:
        yield
        return
    before = level()
    set_level(max(before, _ERROR))
    try:
        yield
    finally:
        set_level(before)
