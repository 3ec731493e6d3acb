"""Makes a process write the stacks of all its threads at SIGUSR1, which would otherwise end it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator

from tfmulti.launch.signals import is_in_set, watched

# The launcher names in this variable the file to which `shim` lets the stacks be written.
STACKS_FILE = "TFMULTI_STACKS_FILE"

# Whether this module has registered the handler of SIGUSR1.
_is_registered = False


def show_at_sigusr1() -> None:
    """Makes the process write its stacks to standard error at SIGUSR1, until it ends.

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
    # This handler is written in C, so it runs while the main thread waits in TensorFlow.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    global _is_registered
    _is_registered = True
