"""Keeps Python's garbage collector from searching the objects of imported libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for imports: the collector is off inside, and ignores their objects afterwards.

    TensorFlow and Keras consist of about 370,000 objects. Without this context the collector
    searches them many times during the import, and again while a step is traced. That took 1.0 s of
    the 4.5 s of core time of `python -m tfmulti.fit --epochs 1`.

    Only a program that has its process to itself may use this context. A library leaves the
    collector to its user.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # The objects that exist at this point move to a generation that is never searched.
        gc.freeze()
        if was_on:
            gc.enable()
