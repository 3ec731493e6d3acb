"""Python's garbage collector, where a program of ours has the process for itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """What is made inside stays for good, and the collector no longer looks through it.

    TensorFlow and Keras are some 370,000 objects, which it went through many times while they
    were imported, and later while a step was traced: 1.0 of the 4.5 s that the first command took
    a core (`python -m tfmulti.fit --epochs 1`). For programs that have their process to
    themselves; a library leaves the collector to its user.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
