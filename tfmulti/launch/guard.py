"""Ends the workers when the launcher has ended for any reason, even by SIGKILL.

The guard is a process of its own that reads a pipe. Only the launcher holds the other end. It
writes the process group of each worker to the pipe. When the launcher ends, the system closes the
pipe. The guard then sends SIGTERM to the groups, waits, and sends SIGKILL to those that are left.
On other machines the agent holds the pipe, in place of the launcher.

If the guard itself is killed, the launcher starts another one:

    python -m tfmulti.launch.guard GRACE_S

If both are killed at once, the workers end by themselves: see `shim.tie_to_launcher`.
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
    """The launcher's side of the guard. Make it before any thread or worker is started.

    The guard is forked, and a process with threads must not fork.

    Args:
        grace_s: the time from SIGTERM to SIGKILL.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._groups: set[int] = set()
        self._replacement: subprocess.Popen[bytes] | None = None
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
        """Puts a process group under guard.

        Args:
            group: the number of the process group.
        """
        self._groups.add(group)
        self._write_line(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes out a process group that has ended, because its number may be used again.

        Args:
            group: the number of the process group.
        """
        self._groups.discard(group)
        self._write_line(f"-{group}\n")

    def check(self) -> None:
        """Starts another guard if this one was killed. Call it often."""
        if not self._is_gone:
            if self._replacement is not None:
                self._is_gone = self._replacement.poll() is not None
            else:
                self._is_gone = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        if self._is_gone:
            self._start_replacement()

    def _write_line(self, line: str) -> None:
        """Writes a line to the guard, or starts another guard that gets all groups."""
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:
            self._start_replacement()

    def _start_replacement(self) -> None:
        """Starts another guard as a new program, because a process with threads must not fork."""
        reader, writer = os.pipe()
        os.set_inheritable(writer, False)
        argv = [sys.executable, "-m", "tfmulti.launch.guard", str(self._grace_s)]
        try:
            self._replacement = subprocess.Popen(argv, stdin=reader, start_new_session=True)
        except OSError:
            # There may be no memory left. The next `check` tries again.
            os.close(writer)
            return
        finally:
            os.close(reader)
        os.close(self._writer)
        self._writer, self._is_gone = writer, False
        for group in self._groups:
            os.write(writer, f"+{group}\n".encode())

    def close(self) -> None:
        """Ends the guard, and with it every process group that is still under guard."""
        os.close(self._writer)
        if self._replacement is not None:
            self._replacement.wait()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(reader: int, grace_s: float) -> None:
    """Reads the process groups until the pipe closes, and ends them. It is the guard's program."""
    # The terminal must not send its signals to the guard.
    os.setsid()
    outlive_signals()
    groups: set[int] = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            group = int(line[1:])
            if line[0] == "+":
                groups.add(group)
            else:
                groups.discard(group)
    end_groups(groups, grace_s)


def outlive_signals() -> None:
    """Makes a process that watches other processes ignore `STOPPING`, and closes its streams.

    Programs that read the output of the watched processes would wait for an open stream.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """Sends SIGTERM to process groups, and SIGKILL to those that are left after `grace_s`.

    Args:
        groups: the numbers of the process groups.
        grace_s: the time from SIGTERM to SIGKILL.
    """
    left = {group for group in groups if send_signal(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if send_signal(group, 0)}
    for group in left:
        send_signal(group, signal.SIGKILL)


def send_signal(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns False if no process of this user is left in it.

    Args:
        group: the number of the process group.
        number: the number of the signal. 0 sends nothing and only checks.
    """
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    _watch(os.dup(0), float(sys.argv[1]))
