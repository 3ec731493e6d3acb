"""Makes a process write its main thread's stack at SIGUSR1, which would otherwise end it.

The handler is one of faulthandler. It is written in C, so it also runs while the main thread waits
inside TensorFlow. Linux gives the signal to the main thread, which can read its own stack. About
one signal in two thousand goes to a thread of TensorFlow, which writes nothing, so a second signal
may be needed. Reading the stacks of other threads while they run crashed the process at one in some
hundred signals. The watchdog of `fit` reads those under Python's lock instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from tfmulti.launch.signals import is_in_set, watched

# The launcher names in this variable the file to which `shim` lets the stacks be written.
STACKS_FILE = "TFMULTI_STACKS_FILE"

# Whether this module has registered the handler of SIGUSR1.
_is_registered = False


def show_at_sigusr1() -> None:
    """Makes the process write its stack to standard error at SIGUSR1, until it ends.

    Under the launcher they go to a file that `shim` has chosen. Nothing changes where SIGUSR1 has a
    handler, also one of faulthandler, or another meaning (TFMULTI_PREEMPTION_SIGNAL), or outside of
    the main thread.
    """
    stderr = own_stderr()
    if _may_register():
        _register(stderr)


@contextlib.contextmanager
def file_of_stacks() -> Iterator[int | None]:
    """A context in which SIGUSR1 adds the stacks to a file, with the descriptor of that file.

    It gives None if this process does not write its stacks at SIGUSR1. After the context they go to
    standard error, except under the launcher.
    """
    path = os.environ.get(STACKS_FILE)
    if path is not None:
        descriptor = None
        # A program that the worker has started gets the variable, too, but not the handler.
        if _is_handled_by_faulthandler():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return
    if not _may_register():
        yield None
        return
    with tempfile.TemporaryFile() as file:
        _register(file.fileno())
        try:
            yield file.fileno()
        finally:
            # Without a handler the signal would end the process.
            _register(own_stderr())


@functools.cache
def own_stderr() -> int:
    """Returns a second descriptor of standard error, which stays open until the process ends.

    The first descriptor is redirected while TensorFlow starts.
    """
    try:
        return os.dup(2)
    except OSError:
        # The process was started without standard error.
        return os.open(os.devnull, os.O_WRONLY)


def _may_register() -> bool:
    """Returns whether this module may register a handler of SIGUSR1."""
    return (
        STACKS_FILE not in os.environ
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        and (_is_registered or not _is_handled_by_faulthandler())
        and signal.SIGUSR1 not in watched(os.environ)
    )


def _is_handled_by_faulthandler() -> bool:
    """Returns whether SIGUSR1 has a handler in this process that Python does not know."""
    is_unknown = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    return is_unknown and is_in_set(os.getpid(), "SigCgt", signal.SIGUSR1)


def _register(file: int) -> None:
    """Sets where SIGUSR1 writes the stacks."""
    write_at_sigusr1(file)
    global _is_registered
    _is_registered = True


def write_at_sigusr1(file: int | IO[str]) -> None:
    """Makes SIGUSR1 add the main thread's stack to a file, which must stay open."""
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
