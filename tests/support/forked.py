"""Starts processes as `tests/support/processes.py` does, but with TensorFlow imported already.

Importing TensorFlow takes three seconds of a core, more than most of the programs that tests start.
A test uses this module if it does not test how the process starts. It starts real
processes where it sends signals before the first step, sets variables that are read by an import,
looks at command lines, or needs workers whose hashes of strings differ.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.support.processes import Processes, clean_env

SERVER = Path(__file__).with_name("fork_server.py")
# Other variables with these beginnings are read when Python, TensorFlow or Keras is imported.
READ_BY_IMPORTS = ("PYTHON", "TF_", "KERAS_", "LD_", "HOME")
READ_LATER = ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "TF_CPU_ALLOCATOR_USE_BFC")


@functools.cache
def _server() -> socket.socket:
    """Returns the connection to this process' server. The server ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, SERVER],
            stdin=its,
            stdout=subprocess.DEVNULL,
            env=clean_env(),
            # Ctrl-C is for the tests, which end what they have started.
            start_new_session=True,
        )
    return ours


class ForkedProcess:
    """A process of the server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, files: list[int]) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"argv": argv, "env": env, "cwd": str(cwd)})
        with its:
            socket.send_fds(_server(), [request.encode()], [*files, its.fileno()])
        self.args = argv
        self.returncode: int | None = None
        self._answers = ours
        # The server first imports TensorFlow, which takes long on a busy machine.
        ours.settimeout(120)
        self.pid = int(ours.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                # Nothing comes if the process that waits for this one was killed.
                self.returncode = int(self._answers.recv(100) or -signal.SIGKILL)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forks(Processes):
    """A group of processes of the server."""

    def _start(
        self, argv: list[str], env: dict[str, str], cwd: Path, out: IO[bytes], err: IO[bytes]
    ) -> ForkedProcess:
        assert argv.pop(0) == sys.executable, "a command before Python needs a new process"
        real = clean_env()
        changed = {
            name
            for name in env.keys() | real.keys()
            if name.startswith(READ_BY_IMPORTS) and env.get(name) != real.get(name)
        }
        assert changed <= set(READ_LATER), f"a forked process has imported already: {changed}"
        return ForkedProcess(argv, env, cwd, [out.fileno(), err.fileno()])


run, run_workers = Forks.run, Forks.run_workers
