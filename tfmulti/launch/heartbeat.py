"""Reports a worker's step, or the reason of its failure, to the launcher that started it.

The launcher names two files in the environment of the worker. A worker writes its heartbeat to the
first file: one line, which is always overwritten in place. `shim` writes error.json, the second
file, when the program fails. Without the variables nothing is written. This module only reports:
`watch` and `policy` decide when a worker counts as dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfmulti.config import json_values
from tfmulti.config.limited_reading import read_small
from tfmulti.errors import UserError

PROGRESS_FILE, ERROR_FILE = "TFMULTI_PROGRESS_FILE", "TFMULTI_ERROR_FILE"

# This variable holds a JSON object: for each folder of checkpoints, the step of the newest one.
SAVED = "TFMULTI_SAVED"

# The usual duration is the one that 90 % of the last 64 executions did not exceed.
_REMEMBERED, _USUAL_SHARE = 64, 0.9
# How often a worker that waits for something outside of the job says so.
_RENEW_S = 2.0

# All fields but the last have a fixed width, so a new line covers the old one.
_LINE = (
    "{step:>15d} {phase:<12} {since_s:>18.3f} {longest_s:>12.3f} {asked:d} {saved:>15d} {folder}\n"
)

# A line with the longest path, and the largest error.json.
_MOST_LINE_BYTES, _MOST_BYTES = 1 << 14, 1 << 24

# The phases. TRAINING: in an execution whose kind has a known duration. FIRST: in an execution that
# is traced, or whose kind has no known duration yet. BUSY: in callbacks, saving and all other work.
TRAINING, FIRST, BUSY = "training", "first", "busy"


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a worker.

    Times are in seconds of `time.monotonic`, which all processes of a machine share.

    Attributes:
        step: the number of steps that have ended.
        phase: what the worker does: TRAINING, FIRST or BUSY.
        since_s: when the worker began what it does.
        longest_s: the duration of its longest execution of the same kind.
        asked: whether this worker itself got a signal to stop.
        saved: the step of the newest checkpoint; -1 without a checkpoint.
        folder: the folder of that checkpoint.
    """

    step: int
    phase: str
    since_s: float
    longest_s: float
    asked: bool = False
    saved: int = -1
    folder: str = ""


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker failed: the content of error.json.

    Attributes:
        message: the text of the exception, or the name of its type if the text is empty.
        type: the name of the exception's type.
        traceback: the traceback, as Python prints it.
        rank: the rank of the worker.
        time_s: when it failed, in seconds of `time.monotonic` on its machine.
    """

    message: str
    type: str
    traceback: str
    rank: int
    time_s: float


class Heartbeat:
    """Writes what this worker does to the file that the launcher reads.

    A file that cannot be written does not end the run. Its errors are ignored.

    Args:
        path: the file, or None if no launcher has started this process.
        clock: returns seconds.
    """

    def __init__(self, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644) if path else None
        self._clock = clock
        self._longest_s: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
        self._durations: weakref.WeakKeyDictionary[object, deque[float]]
        self._durations = weakref.WeakKeyDictionary()
        # The last durations of the kind of the last execution, in seconds.
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._record = HeartbeatRecord(0, BUSY, 0.0, 0.0)
        # Whether the current execution is traced.
        self._is_traced = False
        # Signals and checkpoints are reported from threads of their own.
        self._lock = threading.Lock()

    def record(self) -> HeartbeatRecord:
        """Returns the last heartbeat."""
        with self._lock:
            return self._record

    def usual_s(self) -> float:
        """Returns how long executions of the last kind usually take, or 0.0 if none has ended.

        Nine in ten of the last executions were shorter. So a single slow one does not count, but
        the longer ones among executions of different numbers of steps do.
        """
        with self._lock:
            durations = sorted(self._recent)
        return durations[int(_USUAL_SHARE * (len(durations) - 1))] if durations else 0.0

    def begin(self) -> None:
        """Reports that training begins."""
        self._write(phase=BUSY, since_s=self._clock(), longest_s=0.0)

    @contextlib.contextmanager
    def working(self, kind: object) -> Iterator[None]:
        """A context that reports an execution, in which workers may wait for each other.

        The first execution of a kind is traced, which takes longer than any later one. So the
        durations count from the second execution on. After the context the phase is BUSY, because
        callbacks, a checkpoint or the handling of an error may take any time.

        Args:
            kind: tells executions of different durations apart, such as training and evaluation.
                It is kept by a weak reference.
        """
        began = self._clock()
        is_new, known_s = kind not in self._longest_s, self._longest_s.get(kind, 0.0)
        self._is_traced = False
        with self._lock:
            self._recent = self._durations.setdefault(kind, deque(maxlen=_REMEMBERED))
        self._write(phase=TRAINING if known_s else FIRST, since_s=began, longest_s=known_s)
        try:
            yield
        finally:
            now = self._clock()
            longest_s = known_s if self._is_traced else max(known_s, now - began)
            self._longest_s[kind] = 0.0 if is_new else longest_s
            if not (is_new or self._is_traced):
                with self._lock:
                    self._recent.append(now - began)
            self._write(phase=BUSY, since_s=now, longest_s=known_s)

    @contextlib.contextmanager
    def waiting_outside(self, most_s: float) -> Iterator[None]:
        """A context in which this worker waits for something outside of the job, such as a server.

        Args:
            most_s: for so many seconds the launcher does not take the worker for stuck.
        """
        until, is_over = self._clock() + most_s, threading.Event()

        def renew() -> None:
            while self._clock() < until and not is_over.wait(_RENEW_S):
                self._write(since_s=self._clock())

        thread = threading.Thread(target=renew, name="tfmulti-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def tracing(self) -> None:
        """Reports that the current execution is traced, for example for a new shape of the batch.

        The duration of this execution does not count.
        """
        if self.record().phase == TRAINING:
            self._is_traced = True
            self._write(phase=FIRST)

    def step(self, step: int) -> None:
        """Reports the number of steps that have ended.

        Args:
            step: the number of steps.
        """
        self._write(step=step)

    def saved(self, step: int, folder: str) -> None:
        """Reports that a checkpoint has been written completely.

        Args:
            step: the step of the checkpoint.
            folder: the folder of the checkpoint.
        """
        self._write(saved=step, folder=folder)

    def asked(self) -> None:
        """Reports that this worker got a signal to stop."""
        self._write(asked=True)

    def _write(self, **changed: Any) -> None:
        """Changes these fields of the record, and writes it to the file."""
        with self._lock:
            self._record = replace(self._record, **changed)
            if self._file is not None:
                # A full disk must not end the run.
                with contextlib.suppress(OSError):
                    os.pwrite(self._file, _LINE.format_map(vars(self._record)).encode(), 0)


_own_heartbeat: Heartbeat | None = None


def heartbeat(env: Mapping[str, str] | None = None) -> Heartbeat:
    """Returns the heartbeat of this process.

    Args:
        env: the environment that names the file. It counts only in the first call. None: that of
            this process.
    """
    global _own_heartbeat
    if _own_heartbeat is None:
        _own_heartbeat = Heartbeat((os.environ if env is None else env).get(PROGRESS_FILE))
    return _own_heartbeat


def read_progress(path: Path) -> HeartbeatRecord | None:
    """Returns the last heartbeat of a worker, or None if it has not sent one.

    Args:
        path: the file to which the worker writes.
    """
    try:
        # The text after the first line is left from a longer line.
        line = read_small(path, _MOST_LINE_BYTES).decode().split("\n", 1)[0]
        step, phase, since_s, longest_s, asked, saved, *folder = line.split(maxsplit=6)
        return HeartbeatRecord(
            int(step),
            phase,
            float(since_s),
            float(longest_s),
            bool(int(asked)),
            int(saved),
            "".join(folder),
        )
    except (OSError, ValueError):
        return None


def saved_before(folder: str, env: Mapping[str, str] | None = None) -> int:
    """Returns the step of the newest checkpoint that earlier attempts have made, or -1.

    Args:
        folder: the folder of the checkpoints.
        env: the environment of the worker. None: that of this process.
    """
    text = (os.environ if env is None else env).get(SAVED)
    try:
        steps = json_values.parse(text) if text else {}
    except json.JSONDecodeError:
        return -1
    step = steps.get(folder) if isinstance(steps, dict) else None
    return step if type(step) is int else -1


def note_error(error: BaseException, env: Mapping[str, str] = os.environ) -> None:
    """Writes error.json if a launcher has started this process, so that it knows the cause.

    A user's mistake is not written, because its exit code tells enough. The file is whole or
    absent, and a failure to write it is ignored.

    Args:
        error: the exception that ends the program.
        env: the environment, which names the file and the rank.
    """
    if not env.get(ERROR_FILE) or isinstance(error, (KeyboardInterrupt, UserError)):
        return
    failure = WorkerFailure(
        message=str(error) or type(error).__name__,
        type=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        rank=int(env.get("RANK", "0")),
        time_s=time.monotonic(),
    )
    path = Path(env[ERROR_FILE])
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(asdict(failure), indent=2))
        os.replace(partial, path)


def read_error(path: Path) -> WorkerFailure | None:
    """Returns the content of error.json, or None if the file is absent or not valid."""
    try:
        return json_values.build(WorkerFailure, json_values.parse(read_small(path, _MOST_BYTES)))
    except (OSError, ValueError):
        return None
