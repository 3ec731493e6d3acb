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
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from tfmulti.errors import ConfigError
from tfmulti.launch.heartbeat import heartbeat

GRACE = "TFMULTI_GRACE_S"  # how long who sends SIGTERM waits before SIGKILL: the launcher tells
GRACE_S = 4.0  # to the end of a step; Ctrl-C is to end everything within five seconds
_MARGIN_S = 1.0  # to end by oneself, with a word, before SIGKILL

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


def sigterm_grace_s(env: Mapping[str, str]) -> float:
    """Returns how long after SIGTERM training may take to end with its last checkpoint written.

    >>> sigterm_grace_s({"TFMULTI_GRACE_S": "30"}), sigterm_grace_s({})
    (29.0, 4.0)

    Raises:
        ConfigError: TFMULTI_GRACE_S is no number of seconds above 0.
    """
    text = env.get(GRACE)
    if text is None:
        return GRACE_S
    try:
        given_s = float(text)
    except ValueError:
        given_s = 0.0
    if not 0 < given_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"{GRACE} is {text!r}, but it must be a number of seconds above 0.")
    return given_s - min(_MARGIN_S, given_s / 4)


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

    Args:
        grace_s: how long training may take to end after a signal; None: after SIGTERM as long as
            the environment says (`sigterm_grace_s`), after SIGINT `GRACE_S`.
        exit: ends the process.

    Raises:
        ConfigError: the environment says no time.
    """

    def __init__(
        self,
        grace_s: float | None = None,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self.stop: Callable[[str], None] | None = None
        self._grace_s = {
            signal.SIGINT: GRACE_S if grace_s is None else grace_s,
            signal.SIGTERM: sigterm_grace_s(os.environ) if grace_s is None else grace_s,
        }
        self._exit = exit
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
        if self._seen and number == signal.SIGTERM and GRACE in os.environ:
            return  # of the launcher and of the system both; it ends with SIGKILL what stays
        self._seen += 1
        heartbeat().asked()
        if self.stop is None or self._seen > 1:
            self._end(number, "nothing more is saved" if self._seen > 1 else "nothing was begun")
        elif not self._done.is_set():
            self.stop(number.name)
            threading.Thread(target=self._force_later, args=(number,), daemon=True).start()

    def _force_later(self, number: signal.Signals) -> None:
        grace_s = self._grace_s[number]
        if not self._done.wait(grace_s):
            self._end(number, f"no step ended, or no checkpoint was written, within {grace_s:g} s")

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
