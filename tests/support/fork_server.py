"""Forks processes that have imported TensorFlow and Keras already.

`tests/support/forked.py` starts this program, and sends its requests through the socket on
standard input. A request holds the arguments of Python, the environment and the directory of the
new process, and its standard output, its standard error and a socket as file descriptors. The
socket brings the id of the process, and later its exit status. TensorFlow has started no runtime
when a process is forked, because importing it starts none.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import types
from typing import Any

import keras  # noqa: F401
import numpy as np
import tensorflow as tf  # noqa: F401

LARGEST_REQUEST = 1 << 20


def main() -> None:
    """Answers requests until the other end is closed. In a forked process, runs its program."""
    # The collector of a forked process would write to each page that holds an object.
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=os.dup(0))
    # This process does not wait for the processes that run `keep`.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        text, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
        if not text:
            return
        if os.fork() == 0:
            requests.detach()
            keep(json.loads(text), *files)
            return
        for file in files:
            os.close(file)


def keep(request: dict[str, Any], out: int, err: int, answers: int) -> None:
    """Forks the program, and reports its exit status. Returns in the program's process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    has_session, starts = os.pipe()
    pid = os.fork()
    if pid:
        os.close(starts)
        # A test may kill the session as soon as it knows the id.
        os.read(has_session, 1)
        with socket.socket(fileno=answers) as answer:
            answer.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            # A test that has failed may have closed its end.
            with contextlib.suppress(OSError):
                answer.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.setsid()
    os.close(starts)
    become(request, out, err)


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Gives this process the state that a new process has, and runs the program."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, out, err)):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    run_python(request["argv"])


def run_python(argv: list[str]) -> None:
    """Does what Python does with its arguments: `-m MODULE …`, `-c CODE …` or `FILE …`."""
    kind, *rest = argv
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv = argv
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
