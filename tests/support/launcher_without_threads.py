"""Runs the launcher, which can start no more threads while the file NO_THREADS exists.

A limit of the system (RLIMIT_NPROC) does not hold for root, who runs these tests.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tfmulti.launch.__main__ import main

NO_THREADS = "TFMULTI_TEST_NO_THREADS"


class Thread(threading.Thread):
    """A thread that starts only while the system has resources for it."""

    def start(self) -> None:
        if Path(os.environ[NO_THREADS]).exists():
            raise RuntimeError("can't start new thread")
        super().start()


if __name__ == "__main__":
    threading.Thread = Thread  # type: ignore[misc]
    sys.exit(main())
