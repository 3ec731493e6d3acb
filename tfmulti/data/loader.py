"""Reads a worker's part of each global batch: in order, ahead of the step, in bounded memory.

The loader reads in one of two ways. Unless the number of threads is given, it measures the first
batch to choose one:

- Data that is quick to read, such as arrays in memory, takes microseconds a batch. The thread that
  asks for the batch reads it, because more threads would only contend for the cores.
- Data that is slow to read, such as files to decode, is read by a pool of threads. Each batch is
  cut into pieces, so that all threads work on the next batch and it is complete soon.

At most `AHEAD` batches are in the making. The batches that the caller holds come on top.
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

# While one batch is completed, the threads that have no piece of it left begin the next one.
AHEAD = 2
# A source raises one of these if a record cannot be read.
RECORD_FAULTS = (OSError, DataError)
# If the rows of a replica take at most this time, they are read without threads.
QUICK_S = 0.001
# TensorFlow uses memory of this alignment as it is, and copies any other.
ALIGNMENT = 64


class ReplicaRange(Protocol):
    """Which replicas a worker has: `local_replicas` of `replicas`, from `first_replica` on."""

    @property
    def first_replica(self) -> int: ...
    @property
    def local_replicas(self) -> int: ...
    @property
    def replicas(self) -> int: ...


class Batch(NamedTuple):
    """The rows of one global batch that a worker has read.

    If examples were left out and this worker has all replicas, `rows` and `first_rows` count
    without them. With several workers these two are as planned, because a worker does not know the
    losses of the others.

    Attributes:
        step: the step, counted from the start of the run.
        rows: the number of rows of the global batch.
        data: for each local replica the rows that it reads, a nest of arrays.
        own_rows: for each local replica how many of its rows count.
        first_rows: for each local replica the position of its first row in the global batch.
        lost: one sentence for each example that could not be read: where it is and why. The rows
            of such examples are left out of `data` and `own_rows` if `skip_bad_records` is set;
            otherwise they are zeros. A replica that lost all of its rows reads one other example,
            which does not count.
    """

    step: int
    rows: int
    data: tuple[Any, ...]
    own_rows: tuple[int, ...]
    first_rows: tuple[int, ...]
    lost: tuple[str, ...] = ()


class _Share:
    """What one replica reads: its examples, the buffers for them, and those that were lost."""

    def __init__(self, examples: np.ndarray, first: int, counts: bool, source: Source) -> None:
        count = len(examples)
        self.examples, self.first, self.counts = examples, first, counts
        self.data = map_nest(lambda leaf: empty((count, *leaf.shape), leaf.dtype), source.specs)
        # The reason of each lost row. One thread reads a piece, so no two threads write one key.
        self.lost: dict[int, str] = {}


class _Begun(NamedTuple):
    """A batch whose pieces have been started; `waiting` has a future for each piece."""

    part: WorkerPart
    shares: list[_Share]
    waiting: list[Future[None]]


class Loader:
    """Reads the batches of a plan from a source.

    An example that cannot be read has one of three effects:

    - With `skip_bad_records` above 0 it is left out. The caller counts how many are left out, and
      stops if they are too many.
    - Without it, if this worker has all replicas, `batches` raises DataError.
    - Without it, if there are other workers, its row is zeros. `Batch.lost` reports it, and the
      step tells the other workers, so that the run ends on all of them.

    Args:
        source: the examples.
        plan: the order of the examples.
        place: the worker's replicas.
        reading: the number of threads, and whether bad examples are left out.
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
        # The lock makes sure that no piece is begun after `stop`.
        self._lock = threading.RLock()

    @property
    def skips_bad(self) -> bool:
        """Whether examples that cannot be read are left out."""
        return self._skips_bad

    @property
    def threads(self) -> int | None:
        """The number of reader threads; 0 if the calling thread reads, None if not measured yet."""
        return self._threads

    def batches(self, first_step: int = 0) -> Generator[Batch, None, None]:
        """Yields the batches from a step on, without end. Closing the generator ends the threads.

        Raises:
            DataError: an example cannot be read; the message says which one and why.
            CancelledError: `stop` was called.
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
        """Ends the reading soon. Another thread may call it.

        Pieces that have not been begun are not read. The generator of `batches` then raises
        `concurrent.futures.CancelledError`.
        """
        with self._lock:
            self._is_stopped = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, step: int) -> WorkerPart:
        """Returns the rows that this worker reads in a step."""
        place = self._place
        return self._plan.part(step, place.first_replica, place.local_replicas, place.replicas)

    def _begin(self, step: int) -> _Begun:
        """Starts to read a batch, and returns its buffers and the futures of its pieces."""
        part = self._part(step)
        examples = self._plan.examples_of(part)
        shares: list[_Share] = []
        waiting: list[Future[None]] = []
        # Four pieces a thread keep all threads at work until the end of a batch.
        pieces = 4 * (self._most if self._threads is None else self._threads)
        for first, last, counts in part.shares:
            own = examples[first - part.begin : last - part.begin]
            shares.append(_Share(own, first, counts, self._source))
            for piece in _pieces(len(own), pieces * len(own) / (part.end - part.begin)):
                waiting.append(self._start(shares[-1], part.epoch, piece))
        return _Begun(part, shares, waiting)

    def _start(self, share: _Share, epoch: int, piece: slice) -> Future[None]:
        """Submits a piece to the pool, or reads it here and measures if it needs threads."""
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
        # The first piece opens files and imports modules, so its time is not measured.
        self._is_warm = True
        return done

    def _read(self, share: _Share, epoch: int, piece: slice) -> None:
        """Reads a piece into its buffers, and notes the rows that could not be read."""
        try:
            self._source.read_into(share.examples[piece], epoch, _rows_of(share.data, piece))
        except RECORD_FAULTS:
            # The error may concern any row of the piece: read them one by one to find out.
            for row in range(piece.start, piece.stop):
                self._read_one(share, epoch, row)
        except Exception as error:
            self._fail(share, piece.start, error)

    def _read_one(self, share: _Share, epoch: int, row: int) -> None:
        """Reads one row of a piece that failed, and notes why it cannot be read."""
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
            self._note(share, row, words)
        except Exception as error:
            self._fail(share, row, error)

    def _note(self, share: _Share, row: int, words: str) -> None:
        """Notes why a row cannot be read, and sets it to zeros, or to empty texts."""
        map_nest(_clear, _rows_of(share.data, slice(row, row + 1)))
        share.lost[row] = words

    def _words(self, share: _Share, row: int, error: Exception) -> str:
        """Returns where the example of a row is and why it cannot be read."""
        return f"{self._source.where(int(share.examples[row]))}: {reason_of(error)}"

    def _fail(self, share: _Share, row: int, error: Exception) -> None:
        """Ends the reading by an error of the storage or of the source's code, not of one record.

        With several workers and no `skip_bad_records`, the error is noted as a lost row, and the
        step tells the other workers. Otherwise it is raised here, and other workers notice that
        this one ends.
        """
        words = self._words(share, row, error)
        if isinstance(error, OSError):
            words += " The storage failed, not a single record. Make it available again."
        else:
            kind, source = type(error).__name__, type(self._source).__name__
            words += f" {source}.read() raised {kind}, which no record causes."
        if not (self._raises or self._skips_bad):
            self._note(share, row, words)
        elif isinstance(error, OSError):
            raise DataError(words) from error
        else:
            error.add_note(words)
            raise error

    def _finished(self, begun: _Begun) -> Batch:
        """Waits for the pieces of a batch, and returns the batch."""
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
        """Returns the rows of a replica without the skipped ones, but at least one row."""
        if not (share.lost and self._skips_bad):
            return share.data
        left = [row for row in range(len(share.examples)) if row not in share.lost]
        return map_nest(lambda a: a[left], share.data) if left else self._one_readable()

    def _one_readable(self) -> Any:
        """Returns one example that can be read, with a leading dimension of 1."""
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
    """Returns how many cores this process may use: its part, if workers share a machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers_here(env))


def workers_here(env: Mapping[str, str] = os.environ) -> int:
    """Returns how many workers the launcher has started on this machine; 1 without the launcher."""
    given = env.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(given)) if given.isdecimal() else 1


# The system reports with these numbers that a disk or a server is away, or that this process has
# too many open files or too little memory.
_OF_STORAGE = {
    getattr(errno, name)
    for name in (
        *("ESTALE", "ENOTCONN", "ENODEV", "ENXIO", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNREFUSED", "ECONNRESET"),
    )
}


def is_of_storage(error: Exception) -> bool:
    """Returns whether the storage has failed, and not just one record; later reads fail, too.

    A local file that is missing or cannot be read counts as the storage's error if its folder
    cannot be listed.
    """
    if not isinstance(error, OSError):
        return False
    name = error.filename
    if error.errno in (errno.ENOENT, errno.EIO) and isinstance(name, str) and "://" not in name:
        return not _can_be_listed(os.path.dirname(name) or ".")
    return error.errno in _OF_STORAGE


def _can_be_listed(folder: str) -> bool:
    """Returns whether the entries of a folder can be read."""
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
        return True
    except OSError:
        return False


def reason_of(error: Exception) -> str:
    """Returns what an exception says as one sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    words = " ".join(str(error).split()) or type(error).__name__
    return words if words.endswith(".") else f"{words}."


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an uninitialized array that TensorFlow takes without a copy.

    For text (`dtype` is `str`) it is an array of objects.
    """
    if dtype == "str":
        return np.empty(shape, object)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return aligned(size).view(dtype).reshape(shape)


def aligned(size: int) -> np.ndarray:
    """Returns `size` uninitialized bytes that TensorFlow takes without a copy.

    TensorFlow copies an array at an address that is no multiple of `ALIGNMENT`.
    """
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _clear(rows: np.ndarray) -> None:
    """Sets rows to zeros, or to empty texts."""
    rows[...] = "" if rows.dtype == object else 0


def _rows_of(buffers: Any, piece: slice) -> Any:
    """Returns views of the rows of a piece."""
    return map_nest(lambda array: array[piece], buffers)


def _pieces(rows: int, wanted: float) -> list[slice]:
    """Returns slices that cut the rows into about `wanted` pieces of at least one row."""
    count = max(1, min(rows, round(wanted)))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def bytes_of(data: Any) -> int:
    """Returns the number of bytes of all arrays of a nest."""
    return sum(leaf.nbytes for leaf in leaves_of(data))
