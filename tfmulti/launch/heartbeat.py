"""What a worker tells the launcher that started it: how far it is, and why it failed.

The launcher names two files in the environment. Nothing happens where it does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tfmulti.config import json_values

PROGRESS_FILE, ERROR_FILE = "TFMULTI_PROGRESS_FILE", "TFMULTI_ERROR_FILE"
SAVED = "TFMULTI_SAVED"  # JSON: of each folder of checkpoints, the step of the newest

_LINE = (
    "{step:>15d} {phase:<12} {since_s:>18.3f} {longest_s:>12.3f} {asked:d} {saved:>15d} {folder}\n"
)
# In an execution; in the first of its kind, which traces; saving, callbacks and all else.
TRAINING, FIRST, BUSY = "training", "first", "busy"


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a worker told last: its step, since when it does what, and the longest such so far.

    It was `asked` to stop where the signal came to this worker itself. `saved` is the step of the
    newest checkpoint, -1 for none, and `folder` where that is.

    The clock is `time.monotonic`, which all processes of a machine share.
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
    """Why a worker failed, as its error.json has it; `time_s` is of `time.monotonic` there."""

    message: str
    type: str
    traceback: str
    rank: int
    time_s: float


class Heartbeat:
    """Writes this worker's step where the launcher reads it: one line, always in its place.

    Args:
        path: the file, or None where no launcher listens.
        clock: returns seconds.
    """

    def __init__(self, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644) if path else None
        self._clock = clock
        self._longest_s: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
        self._step = 0
        self._asked, self._saved, self._folder = False, -1, ""
        self._last = (BUSY, 0.0, 0.0)
        self._is_traced = False  # what is computed now
        self._lock = threading.Lock()  # signals and checkpoints have threads of their own

    def begin(self) -> None:
        """Says that training begins."""
        self._tell(BUSY, self._clock())

    @contextlib.contextmanager
    def working(self, kind: object) -> Iterator[None]:
        """Says that inside an execution is computed, in which workers may wait for each other.

        The first of a `kind` is traced, which takes as long as no other; so only the second tells
        how long one takes. What follows (callbacks, a checkpoint) may take its time, too, and so
        may who goes on after an error.
        """
        began = self._clock()
        is_new, known = kind not in self._longest_s, self._longest_s.get(kind, 0.0)
        self._is_traced = False
        self._tell(TRAINING if known else FIRST, began, known)
        try:
            yield
        finally:
            now = self._clock()
            longest_s = known if self._is_traced else max(known, now - began)
            self._longest_s[kind] = 0.0 if is_new else longest_s
            self._tell(BUSY, now, known)

    def tracing(self) -> None:
        """Says that what is computed now is traced first, as for a batch of another shape."""
        phase, since_s, longest_s = self._last
        if phase == TRAINING:
            self._is_traced = True
            self._tell(FIRST, since_s, longest_s)

    def step(self, step: int) -> None:
        """Says that so many steps have ended."""
        self._step = step
        self._tell()

    def saved(self, step: int, folder: str) -> None:
        """Says that a checkpoint of that step is whole, and in which folder."""
        self._saved, self._folder = step, folder
        self._tell()

    def asked(self) -> None:
        """Says that this worker got a signal to stop."""
        self._asked = True
        self._tell()

    def _tell(self, phase: str | None = None, now: float = 0.0, longest_s: float = 0.0) -> None:
        with self._lock:
            if phase is not None:
                self._last = (phase, now, longest_s)
            if self._file is not None:
                line = _LINE.format(
                    step=self._step,
                    phase=self._last[0],
                    since_s=self._last[1],
                    longest_s=self._last[2],
                    asked=self._asked,
                    saved=self._saved,
                    folder=self._folder,
                )
                with contextlib.suppress(OSError):  # a full disk does not end the run
                    os.pwrite(self._file, line.encode(), 0)


_teller: Heartbeat | None = None


def heartbeat(env: Mapping[str, str] | None = None) -> Heartbeat:
    """Returns this process' teller."""
    global _teller
    if _teller is None:
        _teller = Heartbeat((os.environ if env is None else env).get(PROGRESS_FILE))
    return _teller


def read_progress(path: Path) -> HeartbeatRecord | None:
    """Returns what a worker told last, or None if it has not yet."""
    try:
        line = path.read_text().split("\n", 1)[0]  # what follows is left of a longer one
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
    """Returns the step of the newest checkpoint that the job has made in a folder, or -1."""
    known: dict[str, int] = json.loads((os.environ if env is None else env).get(SAVED) or "{}")
    return known.get(folder, -1)


def write_error(path: Path, error: BaseException, rank: int) -> None:
    """Writes error.json: what went wrong in this worker, when, and where."""
    failed = WorkerFailure(
        message=str(error) or type(error).__name__,
        type=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        rank=rank,
        time_s=time.monotonic(),
    )
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(asdict(failed), indent=2))
        os.replace(partial, path)


def read_error(path: Path) -> WorkerFailure | None:
    """Returns the content of error.json, or None where there is none that is whole."""
    try:
        return json_values.build(WorkerFailure, json_values.parse(path.read_bytes()))
    except (OSError, ValueError):
        return None
