"""Runs a program under a parent process of its own where it would be the first of a container.

That parent ends a worker by SIGTERM also while TensorFlow waits for the other workers and handles
no signal.

The first process of a container usually has PID 1. Linux drops a signal to PID 1 unless that
process has set a handler, see pid_namespaces(7). So SIGTERM would not end a worker that imports
TensorFlow or loads its data. SIGTERM is still dropped until Python runs, about 0.3 s. Two things
prevent that. With `shareProcessNamespace`, as in our manifests, the worker is not PID 1. After `env
--block-signal=TERM`, as in our image, Linux keeps the signal until this module reads it.
"""

from __future__ import annotations

import os
import signal

from tfmulti.errors import EXIT_TERMINATED
from tfmulti.launch.signals import JOINING, is_in_set


def leave_first_process() -> None:
    """Forks if this process is the first of its container, and returns in the new process.

    The first process stays: it forwards each signal to the new one, collects the exit codes of
    processes whose parents have ended, and ends with the new one's exit code. That is 128 + the
    number of the signal if a signal has ended it. SIGTERM is not blocked in the process that
    returns.
    """
    # The parent of a container's first process is outside of its PID namespace.
    if os.getppid() != 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    # A blocked signal waits until it is read, also in the first process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child:
        os._exit(_exit_code(child))
    # Ctrl-C goes to all processes of a session at once, and the first process forwards it as well.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, before - {signal.SIGTERM})


def _exit_code(child: int) -> int:
    """Forwards signals to a child process until it ends, and returns its exit code."""
    is_killed = False
    while True:
        number = signal.sigwait(signal.valid_signals())
        if number != signal.SIGCHLD:
            os.kill(child, number)
            if number == signal.SIGTERM and _is_joining(child):
                os.kill(child, signal.SIGKILL)
                is_killed = True
            continue
        code = _ended(child)
        if code is not None:
            return EXIT_TERMINATED if is_killed else code


def _is_joining(process: int) -> bool:
    """Returns whether a process waits inside TensorFlow for the other workers to join.

    TensorFlow's handler of SIGTERM is in place then, and does nothing. `signals.default_signals`
    blocks the signal `JOINING` meanwhile.
    """
    return is_in_set(process, "SigBlk", JOINING) and is_in_set(process, "SigCgt", signal.SIGTERM)


def _ended(child: int) -> int | None:
    """Collects all children that have ended, and returns the exit code of one if it has, too."""
    code = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        # No child is left.
        pass
    return code if code is None or code >= 0 else 128 - code
