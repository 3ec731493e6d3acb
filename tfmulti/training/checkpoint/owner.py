"""Lets one process at a time write to a run's folder: the owner.

The owner writes `owner.json` into the folder, with its run, attempt, host and process. These are
the rules:

1. While the owner lives, it touches the file every two seconds. This shows other processes that the
   owner lives. It works on NFS, too, and does not depend on the clocks of the machines.
2. A second process is refused while the owner lives. A later attempt of the same job takes over at
   once, because the launcher has given up the earlier attempt.
3. An owner checks the file before it writes or removes anything, and each time it touches the file.
   If the folder has a new owner, the process ends.
4. The file stays after its owner has ended. So an earlier attempt that was suspended for a while
   still sees that the folder has another owner.

The number of the attempt serves as a fencing token (Kleppmann, "How to do distributed locking",
2016).
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
from tfmulti.config.limited_reading import open_regular, read_small
from tfmulti.config.run_directory import remove_partial, write_text
from tfmulti.config.troubleshooting import documented, print_error
from tfmulti.errors import EXIT_FAILED, ResumeError, TfmultiError

FILE = "owner.json"
# The owner touches the file at this interval.
BEAT_S = 2.0
# The time until another machine sees a new file on NFS.
ROUND_S = 1.0
# An NFS client may remember for this time that a file is not there (acdirmin, nfs(5)).
SEEN_S = 35.0
# An owner on another machine that has not touched the file for this time has ended.
SILENT_S = 20.0
# The system reports with these numbers that the disk or the quota is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A process that waits looks at the file at this interval.
_LOOK_S = 0.5
# A larger file is of another program.
_MOST_BYTES = 4096


class NotOwnerError(TfmultiError):
    """Raised if another process owns the folder, so that this process must not write there."""


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder, as `owner.json` describes it.

    Attributes:
        run_id: the job's id from the launcher; empty without a launcher.
        attempt: the number of the job's attempt.
        host: the name of the machine.
        since: the local time at which the process made this description.
        machine: the boot id of the kernel and the namespace of process ids. Within it, `pid` and
            `began` together name one process.
        pid: the process id.
        began: the time at which the process began, in ticks since the boot.
        token: a random text, which no other process has.
        ended: whether the process has given the folder back.
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
        """Returns a description of the process for a message, in one line."""
        run = f" (run {self.run_id[:64]!r}, attempt {self.attempt})" if self.run_id else ""
        return f"process {self.pid} on {self.host[:255]!r} since {self.since[:32]!r}{run}"


class Ownership:
    """The right of this process to write to a folder.

    Args:
        folder: the folder; it is made when it is taken.
        env: the environment, in which the launcher names the job and the attempt.
        end: a function that ends the process with an exit code.
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
        # The beating thread and the thread that releases the folder write the same file.
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def token(self) -> str:
        """Returns the random text of this process in the file."""
        return self._mine.token

    def is_written(self, token: str | None = None) -> bool:
        """Returns whether the file has `token`, or this process' token if it is None.

        It waits up to `SEEN_S` for the token of another process.
        """
        until = time.monotonic() + (SEEN_S if token else 0.0)
        while True:
            with contextlib.suppress(OSError):
                owner = _read(self._path)
                if owner is not None and owner.token == (token or self._mine.token):
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)

    def take(self) -> None:
        """Takes the folder. Every `take` needs a `release`.

        The call decides at once if the last owner has given the folder back, ran on this machine,
        or is an earlier attempt of this job. Otherwise it watches the file for up to `SILENT_S`
        seconds to see whether that owner lives.

        Raises:
            ResumeError: another process owns the folder, and lives.
            OSError: the folder cannot be made or written. A full disk gives a message only.
        """
        self._count += 1
        if self._count > 1:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self._folder) as is_locked:
                self._take()
                if not is_locked or _may_be_shared(self._folder):
                    time.sleep(ROUND_S)
                    self._check_first()
        except BaseException:
            self._count = 0
            raise
        # The processes that wrote the partial files have ended.
        remove_partial(self._folder)
        atexit.register(self._leave)
        # A thread of an earlier `take` keeps its own event, so it cannot go on by mistake.
        self._released = threading.Event()
        threading.Thread(
            target=self._beat, args=(self._released,), name="tfmulti-owner", daemon=True
        ).start()

    def _check_first(self) -> None:
        """Raises ResumeError if another machine took the folder in the same moment."""
        other = _read(self._path)
        if other is not None and other != self._mine:
            raise self._refused(other)

    def _refused(self, other: Owner) -> ResumeError:
        """Returns the error for a folder that another living process owns."""
        error: ResumeError = ResumeError(
            f"{self._folder} is in use by another run: {other.in_words()}. Wait until it "
            "ends, or give another folder."
        )
        return error

    def _take(self) -> None:
        """Writes this process into the file, unless another owner lives."""
        other = self._owner_that_lives()
        if other is not None:
            raise self._refused(other)
        try:
            self._write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # The file names an owner that has ended.
            self._path.unlink(missing_ok=True)
            words = (
                f"tfmulti: no {FILE} in {self._folder}: {error.strerror}. Until there is room "
                "for it, a second start there is not noticed."
            )
            print(documented(words), file=sys.stderr, flush=True)

    def release(self) -> None:
        """Gives the folder back, once it was released as often as it was taken."""
        self._count = max(0, self._count - 1)
        if self._count == 0 and not self._released.is_set():
            self._leave()

    def check(self) -> None:
        """Raises an error if the folder belongs to another process.

        Raises:
            NotOwnerError: another process owns the folder, and is no earlier attempt of this job.
            OSError: the file cannot be read.
        """
        owner = _read(self._path)
        if owner is not None and owner != self._mine and not self._is_earlier(owner):
            raise NotOwnerError(
                f"{self._folder} now belongs to {owner.in_words()}: this process (attempt "
                f"{self._mine.attempt}) ends without saving."
            )

    def end(self, error: NotOwnerError) -> None:
        """Prints an error, and ends this process with the exit code of a failure."""
        # Printing blocks for ever if the reader of this process' output has stopped reading. Then
        # the timer ends the process.
        timer = threading.Timer(BEAT_S, self._end, [EXIT_FAILED])
        timer.daemon = True
        timer.start()
        with contextlib.suppress(OSError, ValueError):
            print_error(error)
            sys.stdout.flush()
        timer.cancel()
        self._end(EXIT_FAILED)

    def _owner_that_lives(self) -> Owner | None:
        """Returns the other process that owns the folder and lives, or None."""
        other = _read(self._path)
        if other is None or other.ended or self._is_earlier(other):
            return None
        if other.machine == self._mine.machine:
            began = _began(other.pid)
            if began == other.began:
                return other
            if began >= 0 or not _is_hidden(other.pid):
                return None
        touched, begin = _touched(self._path), time.monotonic()
        is_told = False
        while (waited_s := time.monotonic() - begin) < SILENT_S:
            if waited_s > 2 * BEAT_S and not is_told:
                is_told = True
                print(
                    f"tfmulti: {self._folder} belonged to {other.in_words()}. Waiting up to "
                    f"{SILENT_S:g} s to see whether that run is alive.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_LOOK_S)
            if _touched(self._path) != touched:
                return _read(self._path)
        return None

    def _is_earlier(self, other: Owner) -> bool:
        """Returns whether another process is an earlier attempt of this job."""
        mine = self._mine
        return mine.run_id != "" and other.run_id == mine.run_id and other.attempt < mine.attempt

    def _write(self, *, ended: bool = False) -> None:
        """Writes this process as the owner into the file."""
        write_text(self._path, json.dumps(asdict(replace(self._mine, ended=ended)), indent=2))

    def _beat(self, released: threading.Event) -> None:
        """Touches the file until the folder is released; ends the process if it lost the folder."""
        while not released.wait(BEAT_S):
            try:
                with self._lock:
                    if released.is_set():
                        return
                    self.check()
                    if _read(self._path) == self._mine:
                        os.utime(self._path)
                    else:
                        # The file was removed, or the disk was full when it was to be written.
                        self._write()
            except NotOwnerError as error:
                self.end(error)
                return
            except OSError:
                # The storage may come back.
                continue

    def _leave(self) -> None:
        """Stops the beat, and writes that the owner has ended if it still owns the folder."""
        # A forked child inherits the `atexit` function, but the folder is its parent's.
        if os.getpid() != self._mine.pid:
            return
        with self._lock:
            self._released.set()
            with contextlib.suppress(OSError, NotOwnerError):
                self.check()
                if self._folder.is_dir():
                    self._write(ended=True)
        atexit.unregister(self._leave)


_known: dict[Path, Ownership] = {}


def ownership_of(folder: Path) -> Ownership:
    """Returns the one `Ownership` of a folder in this process.

    Args:
        folder: the folder. Other paths to the same folder give the same object.
    """
    real_path = Path(os.path.realpath(folder))
    return _known.setdefault(real_path, Ownership(real_path))


def fence_of(folder: Path) -> Callable[[], None]:
    """Returns a check that raises NotOwnerError once the folder has another owner than now.

    Workers that do not own the folder call it before they write their own files beside it.
    """
    path, token = folder / FILE, ""

    def check() -> None:
        nonlocal token
        owner = _read(path)
        if owner is None:
            return
        token = token or owner.token
        if owner.token != token:
            raise NotOwnerError(
                f"{folder} now belongs to {owner.in_words()}: this process writes nothing more "
                "there."
            )

    with contextlib.suppress(OSError):
        check()
    return check


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Locks a folder inside the context, so that no other process of this machine can lock it.

    It yields False if the file system cannot lock folders, such as NFS.

    Raises:
        ResumeError: another process keeps the folder locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    """Locks a folder, and returns False if its file system cannot lock folders, such as NFS."""
    until = time.monotonic() + SILENT_S + 5.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _may_be_shared(folder: Path) -> bool:
    """Returns whether other machines may see a folder whose lock they may not see.

    NFS and FUSE may keep locks on the machine. Such file systems have no block device, and their
    device numbers have the major number 0, as those of tmpfs and overlay file systems.
    """
    return os.major(os.stat(folder).st_dev) == 0


def _read(path: Path) -> Owner | None:
    """Returns the owner that a file names, or None if there is no file or it has another form.

    A named pipe, a device and a file that is too large have another form.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        owner: Owner = json_values.build(Owner, json_values.parse(_content(path)))
        return owner
    except ValueError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.EFBIG):
            return None
        raise


def _content(path: Path) -> bytes:
    """Returns the content of a file, also if another machine replaces it at this moment."""
    try:
        return read_small(path, _MOST_BYTES)
    except OSError as error:
        # An NFS server forgets a file as soon as another one has taken its name.
        if error.errno != errno.ESTALE:
            raise
        return read_small(path, _MOST_BYTES)


def _touched(path: Path) -> int | None:
    """Returns when a file was last touched, in nanoseconds, or None if it cannot be read.

    The file is opened each time, because that makes an NFS client ask the server again.
    """
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _machine() -> str:
    """Returns what names this machine's boot and this process' namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # No other process gets the same text, so none takes this machine for its own.
        return secrets.token_hex(8)


def _began(pid: int) -> int:
    """Returns when a process began, in ticks since the boot, or -1 if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # The second field is the name of the program in parentheses, which may hold any character.
    state, *rest = text.rpartition(")")[2].split()
    return -1 if state in ("Z", "X") else int(rest[18])


def _is_hidden(pid: int) -> bool:
    """Returns whether a process of another user has this id; its /proc may be hidden."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False
