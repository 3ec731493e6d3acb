"""Ends the workers when the launcher is gone, however it went.

The guard is a process of its own that reads a pipe whose other end the launcher alone holds.
The launcher writes each worker's process group there; when it ends, SIGKILL included, the
pipe closes: the guard sends SIGTERM, waits, and sends SIGKILL to what is left. Where the guard
itself is killed the launcher starts another one:

    python -m tfmulti.launch.guard GRACE_S

Who kills both at once leaves the workers to themselves: see `shim.tie_to_launcher`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """The launcher's side. Make it before any thread or worker is started."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._groups: set[int] = set()
        self._another: subprocess.Popen[bytes] | None = None
        self._is_gone = False
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
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes one out that has ended: its number may be another's by now."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def check(self) -> None:
        """Starts another guard where this one was killed. To be called often."""
        if not self._is_gone:
            if self._another is not None:
                self._is_gone = self._another.poll() is not None
            else:
                self._is_gone = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        if self._is_gone:
            self._start_another()

    def _tell(self, line: str) -> None:
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:
            self._start_another()

    def _start_another(self) -> None:
        """By a new program, since this process has threads by now and must not fork."""
        reader, writer = os.pipe()
        os.set_inheritable(writer, False)
        argv = [sys.executable, "-m", "tfmulti.launch.guard", str(self._grace_s)]
        try:
            self._another = subprocess.Popen(argv, stdin=reader, start_new_session=True)
        except OSError:  # for want of memory, perhaps; it is tried again
            os.close(writer)
            return
        finally:
            os.close(reader)
        os.close(self._writer)
        self._writer, self._is_gone = writer, False
        for group in self._groups:
            os.write(writer, f"+{group}\n".encode())

    def close(self) -> None:
        """Ends the guard; what is still under it is ended too."""
        os.close(self._writer)
        if self._another is not None:
            self._another.wait()
            return
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


if __name__ == "__main__":
    _watch(os.dup(0), float(sys.argv[1]))
