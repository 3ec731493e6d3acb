"""Tells what a worker waits for when no step ends for far longer than usual, and at SIGUSR1.

Every worker has a watchdog of its own, a thread that never waits for another worker. When it finds
that the steps have stopped, it writes hang_worker_K.json into its folder: the step, what the worker
does, the collectives that wait, each with the workers whose part has not come, and the stacks of
all threads. On the chief it also prints a line that names the worker all others wait for.

If the workers share the folder, the file of one worker makes the others write theirs, too, unless
their own steps go on. So the line also says what the worker was doing for which the others wait.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import keras

from tfmulti.config import json_values
from tfmulti.config.limited_reading import read_small
from tfmulti.config.run_directory import write_text
from tfmulti.distribution.collectives import purpose_of
from tfmulti.distribution.connections import made_channel
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError
from tfmulti.launch.heartbeat import BUSY, FIRST, TRAINING
from tfmulti.launch.heartbeat import heartbeat as own_heartbeat
from tfmulti.launch.shim import STACKS_FILE
from tfmulti.training.checkpoint.callback import Checkpoint
from tfmulti.training.checkpoint.owner import NotOwnerError, fence_of

_LOOK_S, _LOOKS_AT_OTHERS = 0.5, 4
# How long the chief waits for the file of the worker that all others wait for.
_OTHERS_S = 5.0
# While no worker computes a step, as in callbacks, or while a step is traced, more time may pass.
_BUSY_TIMES = 6
_OWN = "tfmulti-watchdog"
_MOST_FRAMES, _MOST_BYTES = 50, 1 << 22
# Files of these packages are not what the user looks for in a stack.
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("tensorflow", "keras", "tfmulti"))


class Watchdog(keras.callbacks.Callback):
    """Names the worker that the others wait for, when no step ends for far longer than usual.

        model.fit(x, y, callbacks=[tfmulti.Watchdog("runs/a")])

    Every worker gives the callback to `fit`. A step is late if it takes more than `times` as long
    as the longest step of its kind so far, and more than `least_s` seconds. In callbacks, while a
    checkpoint is written and while a step is traced, six times `least_s` may pass. Each worker then
    writes `hang_worker_K.json` into the folder, once for each time that the steps stop. SIGUSR1
    makes a worker write it at once. The training is never ended.

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

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, because what it watches is of this process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, because `get_state` returns nothing."""


@contextlib.contextmanager
def watching(callbacks: Iterable[keras.callbacks.Callback], placement: Placement) -> Iterator[None]:
    """Runs the thread of each `Watchdog` among the callbacks while the context lasts.

    If there is a Checkpoint, the threads write no file once another process owns its folder: a
    worker that was cut off must not replace the files of the job that goes on.

    Args:
        callbacks: all callbacks that this worker runs.
        placement: this process' place among the workers.
    """
    given = list(callbacks)
    checks = [fence_of(each.folder) for each in given if isinstance(each, Checkpoint)]
    with contextlib.ExitStack() as stack:
        for callback in given:
            if isinstance(callback, Watchdog):
                stack.enter_context(_Watch(callback, placement, checks))
        yield


class _Watch:
    """The thread of a watchdog, as a context."""

    def __init__(
        self, about: Watchdog, placement: Placement, checks: list[Callable[[], None]]
    ) -> None:
        self._about, self._placement, self._checks = about, placement, checks
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_OWN, daemon=True)
        # Under the launcher the file of the stacks belongs to it; it grows at SIGUSR1.
        self._given = os.environ.get(STACKS_FILE)
        self._stacks: IO[bytes] | None = None
        self._size = 0

    def __enter__(self) -> _Watch:
        if self._given is None and _may_take_signal():
            self._stacks = tempfile.TemporaryFile()
            # This handler is written in C, so it runs while the main thread waits in TensorFlow.
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._size = self._stack_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        # It may be writing to a file server that is gone.
        self._thread.join(_LOOK_S * 4)
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks.close()

    def _stack_bytes(self) -> int:
        """Returns the size of the file to which SIGUSR1 adds the stacks."""
        with contextlib.suppress(OSError):
            if self._stacks is not None:
                return os.fstat(self._stacks.fileno()).st_size
            if self._given is not None:
                return os.stat(self._given).st_size
        return self._size

    def _run(self) -> None:
        """Looks at the heartbeat until the training ends."""
        told_since_s: float | None = None
        known, looks = self._files_of_others(), 0
        while not self._end.wait(_LOOK_S):
            looks += 1
            size = self._stack_bytes()
            asked, self._size = size > self._size, size
            late_s = self._late_s()
            since_s = own_heartbeat().record().since_s
            is_told = since_s == told_since_s
            if looks % _LOOKS_AT_OTHERS == 0:
                before, known = known, self._files_of_others()
                stands = time.monotonic() - since_s > self._about.least_s / 2
                if known != before and stands and not is_told and late_s is None:
                    late_s = time.monotonic() - since_s
            if asked or (late_s is not None and not is_told):
                told_since_s = told_since_s if late_s is None else since_s
                try:
                    self._tell(asked, late_s)
                except NotOwnerError as error:
                    print(f"tfmulti: {error}", file=sys.stderr, flush=True)
                    return
                except OSError:
                    # The storage may come back.
                    continue

    def _files_of_others(self) -> dict[str, int]:
        """Returns the times of the files that other workers have written, by name."""
        folder, own, found = self._about.folder, _file(self._placement.rank), {}
        if folder is not None and self._placement.workers > 1:
            with contextlib.suppress(OSError):
                for path in folder.glob(_file("*")):
                    if path.name != own:
                        found[path.name] = path.stat().st_mtime_ns
        return found

    def _late_s(self) -> float | None:
        """Returns how long the worker has done what it does, if that is too long; else None."""
        found, about = own_heartbeat().record(), self._about
        limit_s = max(about.times * found.longest_s, about.least_s)
        if found.phase in (FIRST, BUSY):
            limit_s = max(limit_s, _BUSY_TIMES * about.least_s)
        passed_s = time.monotonic() - found.since_s
        return passed_s if passed_s > limit_s else None

    def _tell(self, asked: bool, late_s: float | None) -> None:
        """Writes this worker's file, and prints the line on the chief."""
        rank, folder = self._placement.rank, self._about.folder
        seen = describe(self._placement)
        path = None
        if folder is not None:
            for check in self._checks:
                check()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / _file(rank)
            write_text(path, json.dumps(seen, indent=1) + "\n")
        if rank == 0 or asked:
            why = "SIGUSR1" if late_s is None else f"no step has ended for {late_s:.0f} s"
            words = f"tfmulti: worker {rank}: {why}; {self._words(seen)}"
            print(words + (f". See {path}" if path else ""), file=sys.stderr, flush=True)

    def _words(self, seen: dict[str, Any]) -> str:
        """Returns what a worker does, or for whom it waits and what that worker does."""
        if not seen["waits"]:
            return f"it is in {seen['at'] or 'TensorFlow'}"
        first = max(seen["waits"], key=lambda each: each["seconds"])
        missing = first["missing"]
        words = (
            f"it waits for worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} in "
            f"{first['what'][:200]}"
        )
        others = [self._of_other(rank) for rank in missing[:3]]
        return "; ".join([words, *others])

    def _of_other(self, rank: int) -> str:
        """Returns what another worker was doing, by the file that it has written."""
        folder = self._about.folder
        if folder is None:
            return f"look at the stacks of worker {rank}: kill -USR1 its process"
        path, now = folder / _file(rank), time.time()
        until = time.monotonic() + _OTHERS_S
        while time.monotonic() < until and not self._end.wait(_LOOK_S):
            found = read(path)
            # A file of an earlier time tells nothing.
            if found is not None and found["time"] > now - self._about.least_s * _BUSY_TIMES:
                place = found["at"] or "TensorFlow"
                return f"worker {rank} was in {place} (process {found['pid']} on {found['host']})"
        return f"worker {rank} tells nothing: its process has stopped, or its machine is lost"


def _file(rank: int | str) -> str:
    """Returns the name of the file of a worker."""
    return f"hang_worker_{rank}.json"


def _may_take_signal() -> bool:
    """Returns whether SIGUSR1 has no handler, which would be replaced."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def describe(placement: Placement) -> dict[str, Any]:
    """Returns what this worker does now: the content of hang_worker_K.json.

    Args:
        placement: this process' place among the workers.
    """
    now, record = time.monotonic(), own_heartbeat().record()
    channel = made_channel(placement)
    stacks = stacks_of_threads()
    return {
        "worker": placement.rank,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "time": time.time(),
        "step": record.step,
        "phase": record.phase,
        "seconds": round(now - record.since_s, 3),
        "longest_step_s": round(record.longest_s, 3),
        "at": _users_line(stacks.get("MainThread", [])) if record.phase != TRAINING else "",
        "waits": [
            {"what": purpose_of(key), "missing": list(missing), "seconds": round(now - since_s, 3)}
            for key, since_s, missing in (channel.waiting() if channel else ())
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
    return "" if inner is None else f"{inner.name} ({inner.filename}:{inner.lineno})"


def read(path: Path) -> dict[str, Any] | None:
    """Returns the content of a file of another worker, or None if it has none that is valid."""
    try:
        found = json_values.parse(read_small(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    kinds = {"at": str, "pid": int, "host": str, "time": float}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), kind) for name, kind in kinds.items()
    ):
        return None
    # It is shown on a terminal.
    return found | {name: "".join(filter(str.isprintable, found[name])) for name in ("at", "host")}
