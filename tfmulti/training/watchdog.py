"""Tells what a worker waits for when no step ends for far longer than usual, and at SIGUSR1.

Every worker has its own watchdog, a thread that never waits for another worker. It watches `fit`,
`evaluate` and `predict` from their first line on. While the workers join, `launch.joining` does the
same. The protocol is:

1. A watchdog that finds that the steps have stopped writes hang_worker_K.json into its folder. The
   file has the step, what the worker does, and the stacks of all threads. It also has the last
   collectives, each with the workers whose part is missing.
2. If the workers share the folder, this file makes the other workers write theirs, too. A worker
   whose own steps continue writes none.
3. The chief prints a line. It names the worker for which all others wait, and says what that worker
   was doing according to its file.

TensorFlow ends a step some seconds after another worker has stopped, which may be sooner. Then the
file and the line say which worker it was waiting for when the step failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from tfmulti.config import json_values
from tfmulti.config.limited_reading import read_small
from tfmulti.config.run_directory import write_text
from tfmulti.config.troubleshooting import documented
from tfmulti.distribution.collectives import purpose_of
from tfmulti.distribution.connections import last_exchanges
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError
from tfmulti.launch.heartbeat import BUSY, FIRST, TRAINING, HeartbeatRecord, heartbeat
from tfmulti.launch.joining import hang_file
from tfmulti.launch.policy import has_lost_a_worker
from tfmulti.launch.stacks import file_of_stacks
from tfmulti.training.checkpoint.callback import Checkpoint, callbacks_in
from tfmulti.training.checkpoint.owner import NotOwnerError, fence_of

_LOOK_S, _LOOKS_AT_OTHERS = 0.5, 4
# How long the chief waits for the file of the worker for which all others wait.
_OTHERS_S = 5.0
# How long the main thread waits, after a step has failed, for the report of this failure.
_FAILED_S = 5.0
# While no worker computes a step, as in callbacks, or while a step is traced, more time may pass.
_BUSY_TIMES = 6
_THREAD = "tfmulti-watchdog"
_MOST_FRAMES, _MOST_BYTES = 50, 1 << 22
# A user looks for other lines in a stack than those of these packages.
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("tensorflow", "keras", "tfmulti"))
_PYTHONS_OWN = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
# A thread reads data if its stack has one of these functions, by the end of the file's path.
_READING = {
    os.path.join("tfmulti", "data", "loader.py"): ("_read", "_read_one"),
    os.path.join("python", "ops", "script_ops.py"): ("__call__",),
}
_MOST_CHARACTERS = 2000
_SILENT = (
    "its process has ended or stopped, its machine is lost, it has not come to fit, evaluate or "
    "predict, or its report is on a disk of its own"
)
# TensorFlow's name of a worker.
_TASK = re.compile(r"/job:\w+(?:/replica:0)?/task:\d+")


class Watchdog(keras.callbacks.Callback):
    """Names the worker that the others wait for, when no step ends for far longer than usual.

        model.fit(x, y, callbacks=[tfmulti.Watchdog("runs/a")])

    Every worker gives the callback to `fit`, `evaluate` or `predict`. The usual time of a step is
    the time that nine in ten of the last steps of its kind did not exceed. A step is late if it
    takes more than `times` the usual time, and more than `least_s` seconds. Before the first step,
    in callbacks, while a checkpoint is written and while a step is traced, six times `least_s` may
    pass. If a step is late, each worker writes `hang_worker_K.json` into the folder, once for each
    time that the steps stop. A worker writes it at once at SIGUSR1, and if TensorFlow ends a step
    because another worker is lost. The callback never ends the training.

    Args:
        folder: the folder of the files, which all workers should share. None takes the folder above
            that of the `Checkpoint` among the callbacks. Without a `Checkpoint` only the line is
            printed.
        times: how many times the usual time a step may take.
        least_s: the number of seconds that each step may take.

    Raises:
        ConfigError: a number is not above 0.
    """

    def __init__(
        self, folder: str | Path | None = None, *, times: float = 5.0, least_s: float = 10.0
    ) -> None:
        super().__init__()
        for name, value in (("times", times), ("least_s", least_s)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}, but it must be above 0.")
        self.folder = None if folder is None else Path(folder)
        self.times, self.least_s = times, least_s
        # Whether its thread runs. An evaluation inside `fit` has the same callbacks.
        self.is_watching = False
        # These functions raise an error once another process owns the folder.
        self.fences: list[Callable[[], None]] = []

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state, since this callback's attributes belong to the process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Ignores `state`, because `get_state` returns nothing."""


@contextlib.contextmanager
def watching(callbacks: Any, placement: Placement) -> Iterator[None]:
    """Runs the thread of each `Watchdog` among the callbacks while the context lasts."""
    given = callbacks_in(callbacks)
    folders = [callback.folder.parent for callback in given if isinstance(callback, Checkpoint)]
    with contextlib.ExitStack() as stack:
        for callback in given:
            if isinstance(callback, Watchdog) and not callback.is_watching:
                if callback.folder is None and folders:
                    callback.folder = folders[0]
                stack.enter_context(_Watch(callback, placement))
        yield


def respect_owner(callbacks: Any, folder: Path) -> None:
    """Makes each `Watchdog` stop writing files once the folder has a new owner.

    A worker that lost its connection must not replace the files of the new attempt of its job.
    """
    for callback in callbacks_in(callbacks):
        if isinstance(callback, Watchdog):
            callback.fences = [fence_of(folder)]


class _Watch:
    """The thread of a watchdog, as a context."""

    def __init__(self, callback: Watchdog, placement: Placement) -> None:
        self._callback, self._placement = callback, placement
        self._end = threading.Event()
        self._thread = _thread(self._run)
        # When this watch began. Earlier records of the heartbeat do not count, such as the end of
        # an earlier `fit` in a notebook.
        self._began_s = 0.0
        self._resources = contextlib.ExitStack()
        # SIGUSR1 makes the file of the stacks grow.
        self._stacks: int | None = None
        self._stacks_bytes = 0

    def __enter__(self) -> _Watch:
        self._stacks = self._resources.enter_context(file_of_stacks())
        self._stacks_bytes = self._size_of_stacks()
        self._callback.is_watching = True
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end.set()
        # The thread may be writing to a file server that does not answer.
        self._thread.join(_LOOK_S * 4)
        self._callback.is_watching = False
        self._resources.close()
        if self._placement.workers > 1 and has_lost_a_worker(error):
            status = describe(self._placement, self._record())
            reporting = _thread(self._report_failed_step, status, str(error))
            reporting.start()
            # The process must end, even if the file server does not answer.
            reporting.join(_FAILED_S)
        # Another call may have no checkpoints.
        self._callback.fences = []

    def _size_of_stacks(self) -> int:
        """Returns the size of the file to which SIGUSR1 adds the stacks."""
        return 0 if self._stacks is None else os.fstat(self._stacks).st_size

    def _run(self) -> None:
        """Looks at the heartbeat until the training ends."""
        reported_since_s: float | None = None
        files, looks = self._files_of_others(), 0
        while not self._end.wait(_LOOK_S):
            looks += 1
            size = self._size_of_stacks()
            has_signal, self._stacks_bytes = size > self._stacks_bytes, size
            late_s = self._late_s()
            since_s = self._record().since_s
            is_reported = since_s == reported_since_s
            if looks % _LOOKS_AT_OTHERS == 0:
                earlier_files, files = files, self._files_of_others()
                passed_s = time.monotonic() - since_s
                has_stopped = passed_s > self._callback.least_s / 2
                if files != earlier_files and has_stopped and not is_reported and late_s is None:
                    late_s = passed_s
            if has_signal or (late_s is not None and not is_reported):
                reported_since_s = reported_since_s if late_s is None else since_s
                try:
                    self._report(has_signal, late_s)
                except NotOwnerError as error:
                    print(f"tfmulti: {error}", file=sys.stderr, flush=True)
                    return
                except OSError:
                    # The storage may come back.
                    continue

    def _files_of_others(self) -> dict[str, int]:
        """Returns the times of the files that other workers have written, by name."""
        folder, times = self._callback.folder, {}
        if folder is not None and self._placement.workers > 1:
            with contextlib.suppress(OSError):
                for path in folder.glob(hang_file("*")):
                    times[path.name] = path.stat().st_mtime_ns
        times.pop(hang_file(self._placement.rank), None)
        return times

    def _record(self) -> HeartbeatRecord:
        """Returns the last record of the heartbeat, which begins no earlier than this watch."""
        record = heartbeat().record()
        return dataclasses.replace(record, since_s=max(record.since_s, self._began_s))

    def _late_s(self) -> float | None:
        """Returns how long the worker has been in its phase if that is too long, or None."""
        record, callback = self._record(), self._callback
        limit_s = max(callback.times * heartbeat().usual_s(), callback.least_s)
        if record.phase in (FIRST, BUSY):
            limit_s = max(limit_s, _BUSY_TIMES * callback.least_s)
        passed_s = time.monotonic() - record.since_s
        return passed_s if passed_s > limit_s else None

    def _report(self, has_signal: bool, late_s: float | None) -> None:
        """Writes this worker's file, and prints the line on the chief.

        If the others wait for the chief, the first of them prints the line.
        """
        rank, status = self._placement.rank, describe(self._placement, self._record())
        path = self._write(status)
        awaited = self._awaited(status) if late_s is not None else []
        if late_s is not None and all(other in awaited for other in range(rank)):
            others = [self._of_other(other) for other in awaited[:3]]
            why = f"no step has ended for {late_s:.0f} s; it {_doing(status)}"
            _print_line(rank, "; ".join([why, *others]), path)
        elif has_signal:
            # The next moment it may wait for another worker, as it should.
            _print_line(rank, f"SIGUSR1; at this moment it {_doing(status)}", path)

    def _awaited(self, status: dict[str, Any]) -> list[int]:
        """Returns the ranks of the workers for which this worker waits, as far as it is known.

        Before the workers have connected, and within a step on GPUs, the collectives do not tell
        it. Then it waits for the workers that are not in a collective according to their files.
        """
        missing, folder = _missing(status), self._callback.folder
        if missing or status["phase"] == BUSY or folder is None:
            return missing
        others = [rank for rank in range(self._placement.workers) if rank != self._placement.rank]
        files = self._files_of(others)
        return [rank for rank, file in files.items() if file is None or file["phase"] == BUSY]

    def _files_of(self, ranks: list[int]) -> dict[int, dict[str, Any] | None]:
        """Returns what other workers have written, after waiting up to `_OTHERS_S` for it."""
        until = time.monotonic() + _OTHERS_S
        while True:
            is_last = self._end.wait(_LOOK_S) or time.monotonic() > until
            files = {rank: self._file_of(rank) for rank in ranks}
            if is_last or all(files.values()):
                return files

    def _file_of(self, rank: int) -> dict[str, Any] | None:
        """Returns what another worker has written, or None if it has written nothing lately."""
        folder = self._callback.folder
        status = None if folder is None else read(folder / hang_file(rank))
        # An old file says nothing about the present.
        oldest = time.time() - self._callback.least_s * _BUSY_TIMES - _OTHERS_S
        return status if status is not None and status["time"] > oldest else None

    def _report_failed_step(self, status: dict[str, Any], error: str) -> None:
        """Writes this worker's file after a step has failed because another worker is lost.

        The first worker that is not missing itself prints the line.
        """
        rank, missing = self._placement.rank, _missing(status)
        status["error"] = error[:_MOST_CHARACTERS]
        try:
            path = self._write(status)
        except (OSError, NotOwnerError):
            return
        if rank > min(set(range(self._placement.workers)) - set(missing), default=rank):
            return
        tasks = ", ".join(dict.fromkeys(_TASK.findall(error.partition("unhealthy")[2])))
        message = f"the step has failed, because TensorFlow has lost {tasks or 'another worker'}"
        if missing:
            others = [self._of_other(other) for other in missing[:3]]
            message = "; ".join([f"the step has failed: it {_doing(status, 'waited')}", *others])
        _print_line(rank, message, path)

    def _write(self, status: dict[str, Any]) -> Path | None:
        """Writes this worker's file and returns its path; None without a folder."""
        folder = self._callback.folder
        if folder is None:
            return None
        for check in self._callback.fences:
            check()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hang_file(self._placement.rank)
        write_text(path, json.dumps(status, indent=1) + "\n")
        return path

    def _of_other(self, rank: int) -> str:
        """Returns what another worker was doing according to its file, as a part of the line."""
        if self._callback.folder is None:
            return f"look at the stacks of worker {rank}: kill -USR1 its process"
        status = self._files_of([rank])[rank]
        if status is None:
            return f"worker {rank} has written no report: {_SILENT}"
        doing = _doing({**status, "waits": ()}, "waited", "was")
        return f"worker {rank} {doing} (process {status['pid']} on {status['host']})"


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """Returns a thread of a watchdog. The process can end while it waits for a file server."""
    return threading.Thread(target=target, args=args, name=_THREAD, daemon=True)


def _print_line(rank: int, message: str, path: Path | None) -> None:
    """Prints the line of a worker."""
    place = f". See {path}" if path else ""
    line = documented(f"tfmulti: worker {rank}: {message}{place}")
    print(line, file=sys.stderr, flush=True)


def _longest_wait(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the collective for which a worker has waited the longest, if it waits for one."""
    return max(status["waits"], key=lambda wait: wait["seconds"], default=None)


def _missing(status: Mapping[str, Any]) -> list[int]:
    """Returns the ranks of the workers for which a worker waits."""
    wait = _longest_wait(status)
    return [] if wait is None else list(wait["missing"])


def _doing(status: Mapping[str, Any], waits: str = "waits", is_: str = "is") -> str:
    """Returns what a worker does according to `describe`, as the words after its name."""
    wait = _longest_wait(status)
    if wait is not None:
        ranks = wait["missing"]
        workers = f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return f"{waits} for {workers} in {wait['what'][:200]}"
    if status["reads"]:
        return f"{waits} for data in {status['reads']}"
    return f"{is_} in {status['at'] or 'TensorFlow'}"


def describe(placement: Placement, record: HeartbeatRecord) -> dict[str, Any]:
    """Returns what this worker does now: the content of hang_worker_K.json."""
    now = time.monotonic()
    stacks, usual_s = stacks_of_threads(), heartbeat().usual_s()
    exchanges = last_exchanges(placement)
    seconds = now - record.since_s
    # While the steps go on, readers are busy with the data of later steps.
    waits_for_data = record.phase != BUSY and seconds > max(usual_s, _LOOK_S)
    return {
        "worker": placement.rank,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "time": time.time(),
        "step": record.step,
        "phase": record.phase,
        "seconds": round(seconds, 3),
        "usual_step_s": round(usual_s, 3),
        "at": _users_line(stacks.get("MainThread", [])) if record.phase != TRAINING else "",
        "reads": _reading_line(stacks) if waits_for_data else "",
        "waits": [
            {
                "what": purpose_of(exchange.key),
                "missing": list(exchange.missing),
                "seconds": round((exchange.ended_s or now) - exchange.began_s, 3),
            }
            for exchange in exchanges
            if exchange.missing
        ],
        "last_collectives": [
            {
                "what": purpose_of(exchange.key),
                "began_s": round(exchange.began_s - now, 3),
                "ended_s": None if exchange.ended_s is None else round(exchange.ended_s - now, 3),
            }
            for exchange in exchanges
        ],
        "stacks": {
            name: [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
            for name, frames in stacks.items()
        },
    }


def stacks_of_threads() -> dict[str, list[traceback.FrameSummary]]:
    """Returns the stack of each Python thread by its name, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: dict[str, list[traceback.FrameSummary]] = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if name != _THREAD:
            while name in stacks:
                name += "'"
            stacks[name] = traceback.extract_stack(frame)[-_MOST_FRAMES:]
    return stacks


def _users_line(stack: list[traceback.FrameSummary]) -> str:
    """Returns the innermost line of a stack that is not in a library, or else the innermost one."""
    libraries = (*_LIBRARIES, "<frozen")
    frames = [f for f in stack if not any(name in f.filename for name in libraries)]
    # The first frame starts the program.
    innermost = frames[-1] if len(frames) > 1 else (stack[-1] if stack else None)
    return _place(innermost)


def _reading_line(stacks: Mapping[str, list[traceback.FrameSummary]]) -> str:
    """Returns where a thread reads data: its innermost line that is in no library, if it has one.

    The result is empty if no thread reads.
    """
    for name, stack in stacks.items():
        reading = [
            index
            for index, frame in enumerate(stack)
            for file, functions in _READING.items()
            if frame.filename.endswith(file) and frame.name in functions
        ]
        inner = stack[reading[-1] + 1 :] if reading and name != "MainThread" else []
        if inner:
            return _place(([frame for frame in inner if not _is_library(frame)] or inner)[-1])
    return ""


def _is_library(frame: traceback.FrameSummary) -> bool:
    """Returns whether a line belongs to Python itself, TensorFlow, Keras or tfmulti."""
    file = frame.filename
    is_pythons = file.startswith(_PYTHONS_OWN) and _INSTALLED not in file
    return is_pythons or "<frozen" in file or any(name in file for name in _LIBRARIES)


def _place(frame: traceback.FrameSummary | None) -> str:
    """Returns a line of a stack in words."""
    return "" if frame is None else f"{frame.name} ({frame.filename}:{frame.lineno})"


def read(path: Path) -> dict[str, Any] | None:
    """Returns the content of a file of another worker, or None if it has none that is valid."""
    try:
        status = json_values.parse(read_small(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    kinds = {"phase": str, "at": str, "reads": str, "pid": int, "host": str, "time": float}
    if not isinstance(status, dict) or not all(
        isinstance(status.get(name), kind) for name, kind in kinds.items()
    ):
        return None
    # These texts are printed on a terminal.
    printed = ("at", "reads", "host")
    return status | {name: "".join(filter(str.isprintable, status[name])) for name in printed}
