"""Tells what a worker waits for when no step ends for far longer than usual, and at SIGUSR1.

Every worker has a watchdog of its own, a thread that never waits for another worker. It watches
`fit`, `evaluate` and `predict` from their first line on. While the workers join, `launch.joining`
does the same. When a watchdog finds that the steps have stopped, it writes hang_worker_K.json into
its folder: the step, what the worker does, the last collectives, each with the workers whose part
has not come, and the stacks of all threads. On the chief it also prints a line that names the
worker all others wait for.

TensorFlow ends a step some seconds after another worker has stopped, which may be sooner. Then the
file and the line say which worker it was waiting for when the step failed.

If the workers share the folder, the file of one worker makes the others write theirs, too, unless
their own steps go on. So the line also says what the worker was doing for which the others wait.
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
from tfmulti.distribution.collectives import purpose_of
from tfmulti.distribution.connections import last_exchanges
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError
from tfmulti.launch.heartbeat import BUSY, FIRST, TRAINING, HeartbeatRecord
from tfmulti.launch.heartbeat import heartbeat as own_heartbeat
from tfmulti.launch.joining import hang_file
from tfmulti.launch.policy import has_lost_a_worker
from tfmulti.launch.stacks import file_of_stacks
from tfmulti.training.checkpoint.callback import callbacks_in
from tfmulti.training.checkpoint.owner import NotOwnerError, fence_of

_LOOK_S, _LOOKS_AT_OTHERS = 0.5, 4
# How long the chief waits for the file of the worker that all others wait for.
_OTHERS_S = 5.0
# How long the main thread waits, after a step has failed, until that is written and printed.
_FAILED_S = 5.0
# While no worker computes a step, as in callbacks, or while a step is traced, more time may pass.
_BUSY_TIMES = 6
_OWN = "tfmulti-watchdog"
_MOST_FRAMES, _MOST_BYTES = 50, 1 << 22
# Files of these packages are not what the user looks for in a stack.
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("tensorflow", "keras", "tfmulti"))
_PYTHONS_OWN = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
# A thread reads data if its stack has one of these functions: the file's end, and the names.
_READING = {
    os.path.join("tfmulti", "data", "loader.py"): ("_read", "_read_one"),
    os.path.join("python", "ops", "script_ops.py"): ("__call__",),
}
_MOST_CHARACTERS = 2000
_SILENT = (
    "its process has ended or stopped, its machine is lost, or it has not come to fit, evaluate or "
    "predict"
)
# TensorFlow's name of a worker.
_TASK = re.compile(r"/job:\w+(?:/replica:0)?/task:\d+")


class Watchdog(keras.callbacks.Callback):
    """Names the worker that the others wait for, when no step ends for far longer than usual.

        model.fit(x, y, callbacks=[tfmulti.Watchdog("runs/a")])

    Every worker gives the callback to `fit`, `evaluate` or `predict`. A step is late if it takes
    more than `times` as long as nine in ten of the last steps of its kind, and more than `least_s`
    seconds. Before the first step, in callbacks, while a checkpoint is written and while a step is
    traced, six times `least_s` may pass. Each worker then writes `hang_worker_K.json` into the
    folder, once for each time that the steps stop. SIGUSR1 makes a worker write it at once, and so
    does a step that TensorFlow ends because another worker is lost. The training is never ended by
    the callback.

    Args:
        folder: the folder of the files, which all workers should share. None: only the line is
            printed.
        times: how many times the usual time a step may take.
        least_s: seconds that a step may take in any case.

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
        # Whether a thread watches for it. `fit` evaluates with the same callbacks.
        self.is_watching = False
        # They raise an error once another process owns the folder.
        self.fences: list[Callable[[], None]] = []

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, because what it watches is of this process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Ignores `state`, because `get_state` returns nothing."""


@contextlib.contextmanager
def watching(callbacks: Any, placement: Placement) -> Iterator[None]:
    """Runs the thread of each `Watchdog` among the callbacks while the context lasts.

    Args:
        callbacks: the callbacks as `fit` takes them.
        placement: this process' place among the workers.
    """
    with contextlib.ExitStack() as stack:
        for callback in callbacks_in(callbacks):
            if isinstance(callback, Watchdog) and not callback.is_watching:
                stack.enter_context(_Watch(callback, placement))
        yield


def respect_owner(callbacks: Any, folder: Path) -> None:
    """Stops each `Watchdog` from writing files once the folder has a new owner.

    A worker that was cut off must not replace the files of the job that goes on.

    Args:
        callbacks: the callbacks as `fit` takes them.
        folder: the folder of the checkpoints.
    """
    for callback in callbacks_in(callbacks):
        if isinstance(callback, Watchdog):
            callback.fences = [fence_of(folder)]


class _Watch:
    """The thread of a watchdog, as a context."""

    def __init__(self, about: Watchdog, placement: Placement) -> None:
        self._about, self._placement = about, placement
        self._end = threading.Event()
        self._thread = _thread(self._run)
        # When this watch began. What the heartbeat told before, such as the end of an earlier `fit`
        # in a notebook, does not count.
        self._from_s = 0.0
        self._at_end = contextlib.ExitStack()
        # The file of the stacks grows at SIGUSR1.
        self._stacks: int | None = None
        self._size = 0

    def __enter__(self) -> _Watch:
        self._stacks = self._at_end.enter_context(file_of_stacks())
        self._size = self._stack_bytes()
        self._about.is_watching = True
        self._from_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end.set()
        # It may be writing to a file server that is gone.
        self._thread.join(_LOOK_S * 4)
        self._about.is_watching = False
        self._at_end.close()
        if self._placement.workers > 1 and has_lost_a_worker(error):
            seen = describe(self._placement, self._record())
            reporting = _thread(self._report_failed_step, seen, str(error))
            reporting.start()
            # The process must end also if the file server is gone.
            reporting.join(_FAILED_S)
        # Another call may have no checkpoints.
        self._about.fences = []

    def _stack_bytes(self) -> int:
        """Returns the size of the file to which SIGUSR1 adds the stacks."""
        return 0 if self._stacks is None else os.fstat(self._stacks).st_size

    def _run(self) -> None:
        """Looks at the heartbeat until the training ends."""
        reported_since_s: float | None = None
        known, looks = self._files_of_others(), 0
        while not self._end.wait(_LOOK_S):
            looks += 1
            size = self._stack_bytes()
            asked, self._size = size > self._size, size
            late_s = self._late_s()
            since_s = self._record().since_s
            is_reported = since_s == reported_since_s
            if looks % _LOOKS_AT_OTHERS == 0:
                before, known = known, self._files_of_others()
                stands = time.monotonic() - since_s > self._about.least_s / 2
                if known != before and stands and not is_reported and late_s is None:
                    late_s = time.monotonic() - since_s
            if asked or (late_s is not None and not is_reported):
                reported_since_s = reported_since_s if late_s is None else since_s
                try:
                    self._report(asked, late_s)
                except NotOwnerError as error:
                    print(f"tfmulti: {error}", file=sys.stderr, flush=True)
                    return
                except OSError:
                    # The storage may come back.
                    continue

    def _files_of_others(self) -> dict[str, int]:
        """Returns the times of the files that other workers have written, by name."""
        folder, own, found = self._about.folder, hang_file(self._placement.rank), {}
        if folder is not None and self._placement.workers > 1:
            with contextlib.suppress(OSError):
                for path in folder.glob(hang_file("*")):
                    if path.name != own:
                        found[path.name] = path.stat().st_mtime_ns
        return found

    def _record(self) -> HeartbeatRecord:
        """Returns the last heartbeat, which began no earlier than this watch."""
        found = own_heartbeat().record()
        return dataclasses.replace(found, since_s=max(found.since_s, self._from_s))

    def _late_s(self) -> float | None:
        """Returns how long the worker has done what it does, if that is too long; else None."""
        found, about = self._record(), self._about
        limit_s = max(about.times * own_heartbeat().usual_s(), about.least_s)
        if found.phase in (FIRST, BUSY):
            limit_s = max(limit_s, _BUSY_TIMES * about.least_s)
        passed_s = time.monotonic() - found.since_s
        return passed_s if passed_s > limit_s else None

    def _report(self, asked: bool, late_s: float | None) -> None:
        """Writes this worker's file, and prints the line on the chief.

        If the others wait for the chief, the first one of them prints it.
        """
        rank, seen = self._placement.rank, describe(self._placement, self._record())
        path = self._write(seen)
        awaited = self._awaited(seen) if late_s is not None else []
        if late_s is not None and all(other in awaited for other in range(rank)):
            others = [self._of_other(other) for other in awaited[:3]]
            why = f"no step has ended for {late_s:.0f} s; it {_doing(seen)}"
            _print_line(rank, "; ".join([why, *others]), path)
        elif asked:
            # The next moment it may wait for another worker, which is how it should be.
            _print_line(rank, f"SIGUSR1; at this moment it {_doing(seen)}", path)

    def _awaited(self, seen: dict[str, Any]) -> list[int]:
        """Returns the ranks of the workers for which this worker waits, as far as it is known.

        Where the collectives do not tell it, as before the workers have connected and on GPUs, they
        are the workers that have not come to a collective themselves.
        """
        missing, folder = _missing(seen), self._about.folder
        if missing or seen["phase"] == BUSY or folder is None:
            return missing
        others = [rank for rank in range(self._placement.workers) if rank != self._placement.rank]
        until = time.monotonic() + _OTHERS_S
        while time.monotonic() < until and not self._end.wait(_LOOK_S):
            if all(self._file_of(rank) for rank in others):
                break
        files = {rank: self._file_of(rank) for rank in others}
        return [rank for rank, file in files.items() if file is None or file["phase"] == BUSY]

    def _file_of(self, rank: int) -> dict[str, Any] | None:
        """Returns what another worker has written, or None if it has written nothing lately."""
        found = None if self._about.folder is None else read(self._about.folder / hang_file(rank))
        # An old file says nothing about the present.
        oldest = time.time() - self._about.least_s * _BUSY_TIMES - _OTHERS_S
        return found if found is not None and found["time"] > oldest else None

    def _report_failed_step(self, seen: dict[str, Any], error: str) -> None:
        """Writes this worker's file after a step has failed because another worker is lost.

        The line is printed by the first worker that is not missing itself.
        """
        rank, missing = self._placement.rank, _missing(seen)
        seen["error"] = error[:_MOST_CHARACTERS]
        try:
            path = self._write(seen)
        except (OSError, NotOwnerError):
            return
        if rank > min(set(range(self._placement.workers)) - set(missing), default=rank):
            return
        tasks = ", ".join(dict.fromkeys(_TASK.findall(error.partition("unhealthy")[2])))
        message = f"the step has failed, because TensorFlow has lost {tasks or 'another worker'}"
        if missing:
            others = [self._of_other(other) for other in missing[:3]]
            message = "; ".join([f"the step has failed: it {_doing(seen, 'waited')}", *others])
        _print_line(rank, message, path)

    def _write(self, seen: dict[str, Any]) -> Path | None:
        """Writes this worker's file and returns its path; None without a folder."""
        folder = self._about.folder
        if folder is None:
            return None
        for check in self._about.fences:
            check()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hang_file(self._placement.rank)
        write_text(path, json.dumps(seen, indent=1) + "\n")
        return path

    def _of_other(self, rank: int) -> str:
        """Returns what another worker was doing, by the file that it has written."""
        if self._about.folder is None:
            return f"look at the stacks of worker {rank}: kill -USR1 its process"
        until = time.monotonic() + _OTHERS_S
        is_last = False
        while not is_last:
            is_last = self._end.wait(_LOOK_S) or time.monotonic() > until
            found = self._file_of(rank)
            if found is not None:
                doing = _doing({**found, "waits": ()}, "waited", "was")
                return f"worker {rank} {doing} (process {found['pid']} on {found['host']})"
        return f"worker {rank} has written no report: {_SILENT}"


def _thread(target: Callable[..., None], *given: object) -> threading.Thread:
    """Returns a thread of a watchdog. The process can end while it waits for a file server."""
    return threading.Thread(target=target, args=given, name=_OWN, daemon=True)


def _print_line(rank: int, message: str, path: Path | None) -> None:
    """Prints the line of a worker."""
    print(f"tfmulti: worker {rank}: {message}{f'. See {path}' if path else ''}", file=sys.stderr)
    sys.stderr.flush()


def _longest(seen: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the collective that a worker waits for the longest, if it waits for one."""
    return max(seen["waits"], key=lambda each: each["seconds"], default=None)


def _missing(seen: Mapping[str, Any]) -> list[int]:
    """Returns the ranks of the workers for which a worker waits."""
    first = _longest(seen)
    return [] if first is None else list(first["missing"])


def _doing(seen: Mapping[str, Any], waits: str = "waits", is_: str = "is") -> str:
    """Returns what a worker does, by its `describe`, as the words after its name."""
    first = _longest(seen)
    if first is not None:
        ranks = first["missing"]
        who = f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return f"{waits} for {who} in {first['what'][:200]}"
    if seen["reads"]:
        return f"{waits} for data in {seen['reads']}"
    return f"{is_} in {seen['at'] or 'TensorFlow'}"


def describe(placement: Placement, record: HeartbeatRecord) -> dict[str, Any]:
    """Returns what this worker does now: the content of hang_worker_K.json.

    Args:
        placement: this process' place among the workers.
        record: its last heartbeat.
    """
    now = time.monotonic()
    stacks, usual_s = stacks_of_threads(), own_heartbeat().usual_s()
    last = last_exchanges(placement)
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
                "what": purpose_of(each.key),
                "missing": list(each.missing),
                "seconds": round((each.ended_s or now) - each.began_s, 3),
            }
            for each in last
            if each.missing
        ],
        "last_collectives": [
            {
                "what": purpose_of(each.key),
                "began_s": round(each.began_s - now, 3),
                "ended_s": None if each.ended_s is None else round(each.ended_s - now, 3),
            }
            for each in last
        ],
        "stacks": {
            name: [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
            for name, frames in stacks.items()
        },
    }


def stacks_of_threads() -> dict[str, list[traceback.FrameSummary]]:
    """Returns the stack of each Python thread by its name, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[str, list[traceback.FrameSummary]] = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if name != _OWN:
            while name in found:
                name += "'"
            found[name] = traceback.extract_stack(frame)[-_MOST_FRAMES:]
    return found


def _users_line(stack: list[traceback.FrameSummary]) -> str:
    """Returns the innermost line of a stack that is not in a library, or else the innermost one."""
    own = [frame for frame in stack if not any(name in frame.filename for name in _LIBRARIES)]
    frames = [frame for frame in own if "<frozen" not in frame.filename]
    # The first frames start the program; what it does is further in.
    inner = frames[-1] if len(frames) > 1 else (stack[-1] if stack else None)
    return _place(inner)


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
        found = json_values.parse(read_small(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    kinds = {"phase": str, "at": str, "reads": str, "pid": int, "host": str, "time": float}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), kind) for name, kind in kinds.items()
    ):
        return None
    # It is shown on a terminal.
    shown = ("at", "reads", "host")
    return found | {name: "".join(filter(str.isprintable, found[name])) for name in shown}
