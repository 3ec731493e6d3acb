"""Ends the workers when the launcher is gone, however it went.

The guard is a process of its own that reads a pipe whose other end the launcher alone holds.
The launcher writes each worker's process group there; when it ends, SIGKILL included, the
pipe closes: the guard sends SIGTERM, waits, and sends SIGKILL to what is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """The launcher's side. Make it before any thread or worker is started."""

    def __init__(self, grace_s: float) -> None:
        reader, self._writer = os.pipe()
        os.set_inheritable(self._writer, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            try:
                _watch(reader, grace_s)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, group: int) -> None:
        """Puts a process group under guard."""
        os.write(self._writer, f"+{group}\n".encode())

    def remove(self, group: int) -> None:
        """Takes one out that has ended: its number may be another's by now."""
        os.write(self._writer, f"-{group}\n".encode())

    def close(self) -> None:
        """Ends the guard; what is still under it is ended too."""
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(reader: int, grace_s: float) -> None:
    os.setsid()  # the terminal's signals are not for it
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)  # else who waits for the launcher's output waits for the guard
    groups: set[int] = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            group = int(line[1:])
            if line[0] == "+":
                groups.add(group)
            else:
                groups.discard(group)
    end_groups(groups, grace_s)


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """Sends SIGTERM to process groups, and SIGKILL to those that are there after `grace_s`."""
    left = {group for group in groups if send(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if send(group, 0)}
    for group in left:
        send(group, signal.SIGKILL)


def send(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns False where nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
