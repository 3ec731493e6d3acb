"""Ctrl-C and SIGTERM end a run within seconds, with what was reached saved.

A signal's Python handler runs between two bytecodes of the main thread, but that thread can
sit in a collective, waiting for a worker that is gone. So the signal is also written to a
pipe (`signal.set_wakeup_fd`), which a thread reads: it asks the training to stop at once,
and ends the process if no step ends in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from tfmulti.launched import teller

GRACE_S = 4.0  # to the end of a step; Ctrl-C is to end everything within five seconds

WATCHED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the process at once, as the system does by itself.

    While a worker waits for the others TensorFlow holds Python's lock, so no handler and no
    thread of Python's runs. Works in the main thread alone; elsewhere it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in WATCHED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


_watches = 0  # how many are entered


def is_watched() -> bool:
    """Whether a SignalWatch is there already, so that another one would take its signals."""
    return _watches > 0


class SignalWatch:
    """A context in which SIGINT and SIGTERM ask `stop` to stop, instead of ending the process.

    Enter it when the strategy is made: those of TensorFlow replace SIGTERM's handler.

    Before `stop` is set, and at a second signal, the process ends at once: nothing is there
    to save. After `finished()` the process is left in peace to write its files.
    Works in the main thread alone; elsewhere (some notebooks) it does nothing.
    """

    def __init__(
        self,
        grace_s: float = GRACE_S,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self.stop: Callable[[str], None] | None = None
        self._grace_s, self._exit = grace_s, exit
        self._done = threading.Event()
        self._seen = 0
        self._active = False

    def __enter__(self) -> SignalWatch:
        self._active = threading.current_thread() is threading.main_thread()
        if not self._active:
            return self
        global _watches
        _watches += 1
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.getsignal(number) for number in WATCHED}
        for number in WATCHED:
            signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._listen, name="tfmulti-signals", daemon=True)
        self._thread.start()
        return self

    def finished(self) -> None:
        """Says that training has ended: a signal no longer ends the process by force."""
        self._done.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if not self._active:
            return
        global _watches
        _watches -= 1
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._writer.close()  # ends the thread
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        while data := self._reader.recv(16):
            for number in data:
                if number in WATCHED:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        self._seen += 1
        teller().asked()
        if self.stop is None or self._seen > 1:
            self._end(number, "nothing more is saved" if self._seen > 1 else "nothing was begun")
        elif not self._done.is_set():
            self.stop(number.name)
            threading.Thread(target=self._force_later, args=(number,), daemon=True).start()

    def _force_later(self, number: signal.Signals) -> None:
        if not self._done.wait(self._grace_s):
            self._end(number, f"no step ended within {self._grace_s:g} s")

    def _end(self, number: signal.Signals, why: str) -> None:
        print(f"tfmulti: stopped by {number.name}: {why}.", file=sys.stderr, flush=True)
        self._exit(128 + number)


def _forget_in_child() -> None:
    """In a forked child: its signals are its own, not the training's."""
    if _watches:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in WATCHED:
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def _ignore(number: int, frame: object) -> None:
    """Does nothing in the main thread: the watching thread has the signal already."""
