"""Who may write to a run's folder: one process at a time, and the newest attempt of a job.

The owner leaves `owner.json` there: its run, attempt, host and process. While it lives it touches
that file every two seconds, on which others see that it does, on NFS too and whatever their clocks
say. A process that comes later is refused while the owner lives, unless it is a later attempt of
the same job: that takes over at once, since the launcher has given the earlier one up. A process
that has lost the folder finds that out before it writes or removes anything, and at its next touch,
and ends. The record stays when its owner has ended, so that an earlier attempt that was stopped
for a while finds it even then.

Fencing by the attempt's number is that of Kleppmann, "How to do distributed locking" (2016).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from tfmulti.config import json_values
from tfmulti.config.run_directory import remove_partial, write_text
from tfmulti.errors import EXIT_FAILED, ResumeError, TfmultiError

FILE = "owner.json"
BEAT_S = 2.0
ROUND_S = 1.0  # until another machine sees a file by NFS
SILENT_S = 20.0  # without a touch, after which an owner on another machine has ended
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOOK_S = 0.5
_MOST_BYTES = 4096


class NotOwner(TfmultiError):
    """Another process owns the folder by now: nothing may be written there any more."""


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder.

    `machine` is its kernel's boot and its namespace of processes, in which `pid` and `began`, in
    ticks since the boot, are its own alone.
    """

    run_id: str
    attempt: int
    host: str
    since: str
    machine: str
    pid: int
    began: int
    token: str
    ended: bool = False

    def in_words(self) -> str:
        """Returns who it is, in a line."""
        run = f" (run {self.run_id[:64]!r}, attempt {self.attempt})" if self.run_id else ""
        return f"process {self.pid} on {self.host[:255]!r} since {self.since[:32]!r}{run}"


class Ownership:
    """This process' right to write to a folder.

    Args:
        env: says the job and the attempt, where the launcher or a scheduler has set them.
        end: ends the process, with an exit code.
    """

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str] = os.environ,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._folder, self._end = Path(os.path.realpath(folder)), end
        self._path = self._folder / FILE
        attempt = env.get("TFMULTI_ATTEMPT", "0")
        self._mine = Owner(
            run_id=env.get("TFMULTI_RUN_ID", ""),
            attempt=int(attempt) if attempt.isdecimal() else 0,
            host=socket.gethostname(),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=_machine(),
            pid=os.getpid(),
            began=_began(os.getpid()),
            token=secrets.token_hex(8),
        )
        self._count = 0
        self._lock = threading.Lock()  # the beat and who releases write the same file
        self._released = threading.Event()

    def take(self) -> None:
        """Takes the folder; every `take` needs a `release`.

        It returns at once where the last owner's process ran on this machine, or is an earlier
        attempt of this job; else it may watch for `SILENT_S` seconds whether that one lives.

        Raises:
            ResumeError: another process owns it, and lives.
            OSError: the folder cannot be made or written. A full disk is none: that is said.
        """
        self._count += 1
        if self._count > 1:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self._folder) as is_locked:
                self._take()
                if not is_locked:
                    time.sleep(ROUND_S)
                    self._check_first()
        except BaseException:
            self._count = 0
            raise
        remove_partial(self._folder)  # those that wrote them have ended
        atexit.register(self._leave)
        self._released = threading.Event()  # a thread of an earlier take has its own
        threading.Thread(
            target=self._beat, args=(self._released,), name="tfmulti-owner", daemon=True
        ).start()

    def _check_first(self) -> None:
        """Checks that no other machine took the folder in the same moment."""
        other = _read(self._path)
        if other is not None and other != self._mine:
            raise self._refused(other)

    def _refused(self, other: Owner) -> ResumeError:
        error: ResumeError = ResumeError(
            f"{self._folder} belongs to a run that goes on: {other.in_words()}. Wait for its "
            "end, or give another folder."
        )
        return error

    def _take(self) -> None:
        other = self._owner_that_lives()
        if other is not None:
            raise self._refused(other)
        try:
            self._write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._path.unlink(missing_ok=True)  # of one that has ended
            print(
                f"tfmulti: no {FILE} in {self._folder}: {error.strerror}. Until there is room "
                "for it, a second start there is not noticed.",
                file=sys.stderr,
                flush=True,
            )

    def release(self) -> None:
        """Gives the folder back, at the last of as many releases as takes."""
        self._count = max(0, self._count - 1)
        if self._count == 0 and not self._released.is_set():
            self._leave()

    def check(self) -> None:
        """Checks that the folder is still this process'.

        Raises:
            NotOwner: it is another's.
        """
        found = _read(self._path)
        if found is not None and found != self._mine and not self._is_earlier(found):
            raise NotOwner(
                f"{self._folder} belongs to {found.in_words()} by now: this process (attempt "
                f"{self._mine.attempt}) ends without saving."
            )

    def end(self, error: NotOwner) -> None:
        """Says who owns the folder now, and ends this process."""
        # Whoever read what this process says may be gone, or read no more.
        late = threading.Timer(BEAT_S, self._end, [EXIT_FAILED])
        late.daemon = True
        late.start()
        with contextlib.suppress(OSError, ValueError):
            print(f"tfmulti: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        late.cancel()
        self._end(EXIT_FAILED)

    def _owner_that_lives(self) -> Owner | None:
        other = _read(self._path)
        if other is None or other.ended or self._is_earlier(other):
            return None
        if other.machine == self._mine.machine:
            began = _began(other.pid)
            if began == other.began:
                return other
            if began >= 0 or not _is_hidden(other.pid):
                return None
        print(
            f"tfmulti: {self._folder} belonged to {other.in_words()}: looking for up to "
            f"{SILENT_S:g} s whether it lives.",
            file=sys.stderr,
            flush=True,
        )
        first, until = _touched(self._path), time.monotonic() + SILENT_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            if _touched(self._path) != first:
                return _read(self._path)
        return None

    def _is_earlier(self, other: Owner) -> bool:
        mine = self._mine
        return mine.run_id != "" and other.run_id == mine.run_id and other.attempt < mine.attempt

    def _write(self, *, ended: bool = False) -> None:
        write_text(self._path, json.dumps(asdict(replace(self._mine, ended=ended)), indent=2))

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(BEAT_S):
            try:
                with self._lock:
                    if released.is_set():
                        return
                    self.check()
                    if _read(self._path) == self._mine:
                        os.utime(self._path)
                    else:  # removed, or it could not be written before
                        self._write()
            except NotOwner as error:
                self.end(error)
                return
            except OSError:
                continue  # the storage is away for a while

    def _leave(self) -> None:
        if os.getpid() != self._mine.pid:
            return  # a child that was forked
        with self._lock:
            self._released.set()
            with contextlib.suppress(OSError, NotOwner):
                self.check()
                if self._folder.is_dir():
                    self._write(ended=True)
        atexit.unregister(self._leave)


_known: dict[Path, Ownership] = {}


def ownership_of(folder: Path) -> Ownership:
    """Returns this process' ownership of a folder, the same for each part of the program."""
    place = Path(os.path.realpath(folder))
    return _known.setdefault(place, Ownership(place))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Inside, no other process of this machine looks for an owner there; gives whether that holds.

    Raises:
        ResumeError: another process keeps the folder locked.
    """
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _is_locked(number, folder)
    finally:
        os.close(number)


def _is_locked(number: int, folder: Path) -> bool:
    """Locks a folder; returns False where its file system locks none, as NFS."""
    until = time.monotonic() + SILENT_S + 5.0
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                raise ResumeError(
                    f"{folder} is locked by another process (flock). End it; 'fuser {folder}' "
                    "names it."
                ) from None
            time.sleep(_LOOK_S / 5)
        except OSError:
            return False


def _read(path: Path) -> Owner | None:
    """Returns the owner that a file names, or None where there is none, or none of that form.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
        found: Owner = json_values.build(Owner, json_values.parse(content))
        return found
    except (FileNotFoundError, ValueError):
        return None


def _touched(path: Path) -> int | None:
    """Returns when a file was last touched; opened anew, which asks an NFS server again."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # unknown: nobody takes it for theirs


def _began(pid: int) -> int:
    """Returns when a process began, in ticks since the boot; -1 where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    state, *rest = text.rpartition(")")[2].split()
    return -1 if state in ("Z", "X") else int(rest[18])


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process of another user, whose /proc this one may not see."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False
