"""Reads a worker's part of each global batch: in order, ahead of the step, in bounded memory.

What is quick to read (arrays in memory: microseconds a batch) is read by the thread that asks
for it, since threads would only contend. What is slow (files to decode) is read by a pool of
threads: a batch is cut into pieces, so that all threads work on the next batch and the first
one is there soon. Which it is, is measured with the first batch.

At most `AHEAD` batches are in the making, and what the caller holds comes on top.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan, WorkerPart
from tfmulti.data.source import Source, leaves_of, map_nest
from tfmulti.errors import DataError

AHEAD = 2  # one is completed while the threads that are done with it begin the next
RECORD_FAULTS = (OSError, DataError)  # by these a source says that a record cannot be read
QUICK_S = 0.001  # a batch that is read in this time is read without threads
ALIGNMENT = 64  # TensorFlow takes such memory as it is, and copies any other


class ReplicaRange(Protocol):
    """Where a worker stands among the replicas."""

    @property
    def first_replica(self) -> int: ...
    @property
    def local_replicas(self) -> int: ...
    @property
    def replicas(self) -> int: ...


class Batch(NamedTuple):
    """A worker's part of a global batch of `rows` rows.

    `data[i]` is what its replica `i` reads, from row `first_rows[i]` on, and `own_rows[i]` how
    many of these count. `lost` says of each example that could not be read where it is and why;
    its row is left out, and `own_rows` does not count it. Nor do `rows` and `first_rows` where
    this worker has all replicas; else they are as planned, since the others' losses are unknown.
    """

    step: int
    rows: int
    data: tuple[Any, ...]
    own_rows: tuple[int, ...]
    first_rows: tuple[int, ...]
    lost: tuple[str, ...] = ()


class _Share:
    """What one replica reads: which examples, where they are put, and which were lost, and why."""

    def __init__(self, examples: np.ndarray, first: int, counts: bool, source: Source) -> None:
        count = len(examples)
        self.examples, self.first, self.counts = examples, first, counts
        self.data = map_nest(lambda leaf: empty((count, *leaf.shape), leaf.dtype), source.specs)
        self.lost: dict[int, str] = {}  # by row; each piece of them is one thread's


class _Begun(NamedTuple):
    part: WorkerPart
    shares: list[_Share]
    waiting: list[Future[None]]


class Loader:
    """Reads the batches of a plan from a source.

    Args:
        reading: how many threads, and whether examples that cannot be read are left out instead
            of ending it; how many of them there may be is the caller's to count. Where none may
            be and there are other workers, another example stands in the place of one that
            cannot be read, and `Batch.lost` has it: the caller tells them.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        place: ReplicaRange,
        reading: ReadOptions,
    ) -> None:
        self._source, self._plan, self._place = source, plan, place
        self._threads, self._most_lost = reading.threads, reading.skip_bad_records
        self._skips_bad = self._most_lost > 0
        self.next_step = reading.next_step
        here = place.local_replicas == place.replicas
        self._raises = not self._skips_bad and here
        self._most = cores()
        self._is_warm = False
        self._pool: ThreadPoolExecutor | None = None
        self._stand_in: Any = None
        self._is_stopped = False
        self._lock = threading.RLock()  # no piece is begun after `stop`

    @property
    def skips_bad(self) -> bool:
        """Whether examples that cannot be read are left out."""
        return self._skips_bad

    @property
    def threads(self) -> int | None:
        """How many threads read; None before the first batch was asked for."""
        return self._threads

    def batches(self, first_step: int = 0) -> Generator[Batch, None, None]:
        """Yields the batches from a step on, without end. Closing it ends the threads.

        Raises:
            DataError: an example cannot be read; it says which, and why.
        """
        begun: deque[_Begun] = deque()
        try:
            while True:
                while len(begun) < (AHEAD if self._threads else 1):
                    begun.append(self._begin(first_step))
                    first_step += 1
                yield self._finished(begun.popleft())
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Ends the reading soon, from another thread: what was not begun is not read any more.

        The generator raises `concurrent.futures.CancelledError` then.
        """
        with self._lock:
            self._is_stopped = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, step: int) -> WorkerPart:
        place = self._place
        return self._plan.part(step, place.first_replica, place.local_replicas, place.replicas)

    def _begin(self, step: int) -> _Begun:
        """Starts to read a batch; returns where it comes and what is to be waited for."""
        part = self._part(step)
        examples = self._plan.examples_of(part)
        shares: list[_Share] = []
        waiting: list[Future[None]] = []
        # So many that all threads have work until the end of a batch.
        pieces = 4 * (self._most if self._threads is None else self._threads)
        for first, last, counts in part.shares:
            own = examples[first - part.begin : last - part.begin]
            shares.append(_Share(own, first, counts, self._source))
            for piece in _pieces(len(own), pieces * len(own) / (part.end - part.begin)):
                waiting.append(self._start(shares[-1], part.epoch, piece))
        return _Begun(part, shares, waiting)

    def _start(self, share: _Share, epoch: int, piece: slice) -> Future[None]:
        with self._lock:
            if self._is_stopped:
                raise CancelledError
            if self._threads and self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "tfmulti-reader")
            if self._pool is not None:
                return self._pool.submit(self._read, share, epoch, piece)
        done: Future[None] = Future()
        done.set_result(None)
        started = time.perf_counter()
        self._read(share, epoch, piece)
        if self._threads is None and self._is_warm:
            seconds = (time.perf_counter() - started) / (piece.stop - piece.start)
            self._threads = self._most if seconds * len(share.examples) > QUICK_S else 0
        self._is_warm = True  # the first piece of all opens files and imports modules
        return done

    def _read(self, share: _Share, epoch: int, piece: slice) -> None:
        """Reads a piece in place, and notes what could not be read."""
        try:
            self._source.read_into(share.examples[piece], epoch, _rows_of(share.data, piece))
        except RECORD_FAULTS:
            for row in range(piece.start, piece.stop):
                self._read_one(share, epoch, row)
        except Exception as error:
            self._fail(share, piece.start, error)

    def _read_one(self, share: _Share, epoch: int, row: int) -> None:
        one = slice(row, row + 1)
        try:
            self._source.read_into(share.examples[one], epoch, _rows_of(share.data, one))
        except RECORD_FAULTS as error:
            if is_of_storage(error):
                self._fail(share, row, error)
                return
            words = self._words(share, row, error)
            if self._raises:
                raise DataError(f"{words} {self.next_step}") from error
            share.lost[row] = words
        except Exception as error:
            self._fail(share, row, error)

    def _words(self, share: _Share, row: int, error: Exception) -> str:
        return f"{self._source.where(int(share.examples[row]))}: {reason_of(error)}"

    def _fail(self, share: _Share, row: int, error: Exception) -> None:
        """Ends the reading by an error that is no record's: the storage's, or of the source's code.

        Other workers hear of it where none may be left out; else they notice that this one ends.
        """
        words = self._words(share, row, error)
        if isinstance(error, OSError):
            words += " The storage fails, not one record: make it readable again."
        else:
            kind, source = type(error).__name__, type(self._source).__name__
            words += f" It is a fault of {source}.read() ({kind}), and of no record."
        if not (self._raises or self._skips_bad):
            share.lost[row] = words
        elif isinstance(error, OSError):
            raise DataError(words) from error
        else:
            error.add_note(words)
            raise error

    def _finished(self, begun: _Begun) -> Batch:
        for piece in begun.waiting:
            piece.result()
        shares, rows = begun.shares, begun.part.rows
        left_out = self._skips_bad
        own_rows = tuple((len(s.examples) - len(s.lost) * left_out) * s.counts for s in shares)
        first_rows = tuple(share.first for share in shares)
        lost = tuple(s.lost[row] for s in shares if s.counts for row in sorted(s.lost))
        if lost and self._place.local_replicas == self._place.replicas:
            rows = sum(own_rows)
            ends = itertools.accumulate(own_rows)
            first_rows = tuple(
                min(end - own, max(rows - 1, 0)) for end, own in zip(ends, own_rows, strict=True)
            )
        data = tuple(self._readable(share) for share in shares)
        return Batch(begun.part.step, rows, data, own_rows, first_rows, lost)

    def _readable(self, share: _Share) -> Any:
        """Returns the rows of a share without those that were lost; but one at least."""
        if not share.lost:
            return share.data
        if not self._skips_bad:
            return self._stood_in(share)
        left = [row for row in range(len(share.examples)) if row not in share.lost]
        return map_nest(lambda a: a[left], share.data) if left else self._one_readable()

    def _stood_in(self, share: _Share) -> Any:
        """Returns the rows of a share, each of those that were lost replaced by another example."""
        try:
            one = self._one_readable()
        except Exception:  # not here: the step runs on nothing, and tells all workers
            one = map_nest(
                lambda a: np.full(1, "" if a.dtype == object else 0, a.dtype), share.data
            )
        for row in share.lost:
            map_nest(_copy_one, _rows_of(share.data, slice(row, row + 1)), one)
        return share.data

    def _one_readable(self) -> Any:
        """Returns one example that can be read, for a replica that lost all of its own."""
        tried = min(self._plan.examples, 1 + self._most_lost)
        for index in range(tried):
            if self._stand_in is None:
                try:
                    self._stand_in = self._source.read(np.array([index]))
                except RECORD_FAULTS:
                    continue
            return self._stand_in
        raise DataError(f"none of the first {tried} examples can be read. Check the files.")


def cores(env: Mapping[str, str] = os.environ) -> int:
    """Returns how many cores this process may use: its part, where workers share a machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers_here(env))


def workers_here(env: Mapping[str, str] = os.environ) -> int:
    """Returns how many workers the launcher has started on this machine; 1 without it."""
    given = env.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(given)) if given.isdecimal() else 1


# By these the system says that a disk or a server is away, or that this process has too much open.
_OF_STORAGE = {
    getattr(errno, name)
    for name in (
        *("ESTALE", "ENOTCONN", "ENODEV", "ENXIO", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNREFUSED", "ECONNRESET"),
    )
}


def is_of_storage(error: Exception) -> bool:
    """Whether an error is the storage's and not a record's: the next one will fail, too."""
    if not isinstance(error, OSError):
        return False
    name = error.filename
    if error.errno in (errno.ENOENT, errno.EIO) and isinstance(name, str) and "://" not in name:
        return not _can_be_listed(os.path.dirname(name) or ".")
    return error.errno in _OF_STORAGE


def _can_be_listed(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
        return True
    except OSError:
        return False


def reason_of(error: Exception) -> str:
    """Returns an exception in one sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    words = " ".join(str(error).split()) or type(error).__name__
    return words if words.endswith(".") else f"{words}."


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an array that TensorFlow can take without a copy; of text, an array of objects."""
    if dtype == "str":
        return np.empty(shape, object)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy_one(out: np.ndarray, rows: Any) -> None:
    out[...] = rows


def _rows_of(buffers: Any, piece: slice) -> Any:
    return map_nest(lambda array: array[piece], buffers)


def _pieces(rows: int, wanted: float) -> list[slice]:
    """Cuts rows into so many pieces, one at least, of one row at least."""
    count = max(1, min(rows, round(wanted)))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def bytes_of(data: Any) -> int:
    """Returns the bytes of the arrays of a nest."""
    return sum(leaf.nbytes for leaf in leaves_of(data))
