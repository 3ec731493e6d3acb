"""Finds the threads that a run has left."""

from __future__ import annotations

import threading
from collections.abc import Collection

from tfmulti.distribution.transport.channel import THREAD


def left_since(before: Collection[threading.Thread]) -> list[str]:
    """Returns the names of the threads that are alive now and were not before, sorted.

    The thread of the connections between workers is not counted. It lives as long as the process,
    like TensorFlow's own threads.
    """
    return sorted({each.name for each in threading.enumerate() if each not in before} - {THREAD})
