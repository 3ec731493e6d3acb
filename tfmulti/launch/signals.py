"""Ends a run within seconds of Ctrl-C or SIGTERM, after it has saved a checkpoint.

Python runs a signal handler between two bytecodes of the main thread. That thread may be inside a
collective, waiting for a worker that is gone, and then the handler never runs. So Python also
writes the signal to a socket (`signal.set_wakeup_fd`), which a thread reads. The thread asks the
training to stop, and ends the process if no step ends in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from tfmulti.errors import ConfigError
from tfmulti.launch.heartbeat import heartbeat

# The launcher sets this variable to the time between SIGTERM and SIGKILL.
GRACE = "TFMULTI_GRACE_S"

# The time to the end of the training where the launcher gives none. With it, Ctrl-C ends the run
# within five seconds.
GRACE_S = 4.0

# How long before SIGKILL the process ends by itself, so that it can print the reason.
_MARGIN_S = 1.0

WATCHED = (signal.SIGINT, signal.SIGTERM)

# The name of a further signal that means the same as SIGTERM, such as USR1. Some schedulers send it
# some time before they end the job.
PREEMPTION_SIGNAL = "TFMULTI_PREEMPTION_SIGNAL"
PREEMPTION_SIGNALS = ("TERM", "USR1", "USR2")


def watched(env: Mapping[str, str]) -> dict[int, signal.Signals]:
    """Returns the signals that end a run, with SIGINT or SIGTERM as what each of them means.

    >>> {number: meaning.name for number, meaning in watched({}).items()}
    {2: 'SIGINT', 15: 'SIGTERM'}

    Raises:
        ConfigError: TFMULTI_PREEMPTION_SIGNAL is not a signal that can be used so.
    """
    meanings = {int(number): number for number in WATCHED}
    name = env.get(PREEMPTION_SIGNAL, "TERM")
    if name not in PREEMPTION_SIGNALS:
        raise ConfigError(
            f"{PREEMPTION_SIGNAL} is {name!r}, but it must be one of "
            f"{', '.join(PREEMPTION_SIGNALS)}."
        )
    return meanings | {int(signal.Signals[f"SIG{name}"]): signal.SIGTERM}


# The main thread blocks this signal, which nobody sends, while TensorFlow makes its strategy.
# TensorFlow's threads inherit what is blocked, and so do the processes that they start.
JOINING = signal.SIGRTMAX - 1


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """A context in which SIGINT and SIGTERM end the process at once, by the system's default.

    While a worker waits for the other workers to join, TensorFlow holds Python's global lock. No
    Python handler and no Python thread runs then. TensorFlow also handles SIGTERM itself and does
    nothing. The main thread blocks `JOINING` meanwhile: this tells `init_process`, which then ends
    the worker. Outside of the main thread the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in WATCHED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {JOINING})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_in_set(process: int, name: str, number: int) -> bool:
    """Returns whether a signal is in one of the sets of a process, from proc(5).

    Args:
        process: the number of the process.
        name: `SigBlk`, what its main thread blocks, or `SigCgt`, what it has a handler for, also
            one that Python does not know.
        number: the number of the signal.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return bool(int(values[name], 16) >> (number - 1) & 1)


def sigterm_grace_s(env: Mapping[str, str]) -> float:
    """Returns how many seconds after SIGTERM training may take to end and write its checkpoint.

    >>> sigterm_grace_s({"TFMULTI_GRACE_S": "30"}), sigterm_grace_s({})
    (29.0, 4.0)

    Raises:
        ConfigError: TFMULTI_GRACE_S is not a number of seconds above 0.
    """
    text = env.get(GRACE)
    if text is None:
        return GRACE_S
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = 0.0
    if not 0 < grace_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"{GRACE} is {text!r}, but it must be a number of seconds above 0.")
    return grace_s - min(_MARGIN_S, grace_s / 4)


# How many SignalWatch contexts are entered.
_watches = 0


def is_watched() -> bool:
    """Returns whether a SignalWatch is active. Another one would take its signals."""
    return _watches > 0


class SignalWatch:
    """A context in which SIGINT and SIGTERM call `stop`, instead of ending the process.

    Enter it after the strategy is made, because TensorFlow's strategies replace the handler of
    SIGTERM. Outside of the main thread, as in some notebooks, the context does nothing.

    - Before `stop` is set, a signal ends the process at once: there is nothing to save.
    - A first signal calls `stop`. If training does not end in time, the process ends.
    - A second signal ends the process at once. A second SIGTERM under the launcher has no effect.
    - After `finished()` a first signal has no effect, so that the process can write its files.

    Attributes:
        stop: is called with the name of the signal, in a thread of its own.

    Args:
        grace_s: the seconds that training may take to end after a signal. None: `sigterm_grace_s`
            of the environment after SIGTERM, and `GRACE_S` after SIGINT.
        exit: ends the process with an exit code.

    Raises:
        ConfigError: TFMULTI_GRACE_S is not a number of seconds above 0, or
            TFMULTI_PREEMPTION_SIGNAL is not a signal that can be used so.
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
        self._meanings = watched(os.environ)
        self._exit = exit
        self._done = threading.Event()
        self._received = 0
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
        self._old_handlers = {number: signal.getsignal(number) for number in self._meanings}
        for number in self._meanings:
            signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._listen, name="tfmulti-signals", daemon=True)
        self._thread.start()
        return self

    def finished(self) -> None:
        """Says that training has ended: a first signal has no effect from here on."""
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
        # The end of the connection ends the thread.
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        """Handles each signal that Python writes to the socket, in a thread of its own."""
        while data := self._reader.recv(16):
            for number in data:
                if number in self._meanings:
                    self._on_signal(self._meanings[number])

    def _on_signal(self, number: signal.Signals) -> None:
        """Asks the training to stop, or ends the process."""
        # The launcher and the system may both send SIGTERM, so a second one is not a request to
        # end at once. The launcher ends by SIGKILL what stays.
        if self._received and number == signal.SIGTERM and GRACE in os.environ:
            return
        self._received += 1
        heartbeat().asked()
        if self.stop is None or self._received > 1:
            self._end(
                number, "nothing more is saved" if self._received > 1 else "nothing was begun"
            )
        elif not self._done.is_set():
            self.stop(number.name)
            threading.Thread(target=self._end_after_grace, args=(number,), daemon=True).start()

    def _end_after_grace(self, number: signal.Signals) -> None:
        """Ends the process if training has not ended after the grace period."""
        grace_s = self._grace_s[number]
        if not self._done.wait(grace_s):
            self._end(number, f"no step ended, or no checkpoint was written, within {grace_s:g} s")

    def _end(self, number: signal.Signals, why: str) -> None:
        """Prints the reason and ends the process with 128 + the number of the signal."""
        print(f"tfmulti: stopped by {number.name}: {why}.", file=sys.stderr, flush=True)
        self._exit(128 + number)


def _reset_in_child() -> None:
    """Gives a forked child the default handlers, so that its signals do not stop the training."""
    if _watches:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in WATCHED:
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)


def _ignore(number: int, frame: object) -> None:
    """Does nothing in the main thread, because the thread of the SignalWatch handles the signal."""
