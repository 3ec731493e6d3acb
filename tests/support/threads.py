"""Which threads a run has left."""

from __future__ import annotations

import threading
from collections.abc import Collection

from tfmulti.distribution.transport.channel import THREAD


def left_since(before: Collection[threading.Thread]) -> list[str]:
    """Returns the names of the threads that are alive now and were not before, sorted.

    That of the connections between workers stays as long as the process, as TensorFlow's own do.
    """
    return sorted({each.name for each in threading.enumerate() if each not in before} - {THREAD})
