"""Reads a worker's rows of each global batch: in order, ahead of the step, in bounded memory.

The loader reads in one of two ways. Unless the number of threads is given, it measures the first
batch to choose one:

- Data that is quick to read, such as arrays in memory, takes microseconds a batch. The thread that
  asks for the batch reads it, because more threads would only contend for the cores.
- Data that is slow to read, such as files to decode, is read by a thread pool. Each batch is cut
  into pieces, four for each thread, so that all threads work on the next batch and it is complete
  soon.

The loader is a bounded prefetcher: at most `AHEAD` batches are being read at a time. The batches
that the caller holds come on top.
"""

from __future__ import annotations

import contextlib
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
from tfmulti.data.bad_records import RECORD_FAULTS, is_of_storage, reason_of
from tfmulti.data.batch_plan import BatchPlan, WorkerPart
from tfmulti.data.buffers import empty_rows
from tfmulti.data.source import Source, map_nest
from tfmulti.errors import DataError

# While one batch is completed, the threads that have no piece of it left begin the next one.
AHEAD = 2
# If the rows of a replica take at most this time, they are read without threads.
QUICK_S = 0.001
# Four pieces for each thread keep all threads at work until the end of a batch.
_PIECES_PER_THREAD = 4


class ReplicaRange(Protocol):
    """Which replicas a worker has: `local_replicas` of `replicas`, from `first_replica` on."""

    @property
    def first_replica(self) -> int:
        """The index of the worker's first replica, counted over all workers."""

    @property
    def local_replicas(self) -> int:
        """The number of replicas of the worker."""

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers."""


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
            otherwise they are zeros, and the sentence has the next step. A replica that lost all of
            its rows reads one other example, which does not count.
    """

    step: int
    rows: int
    data: tuple[Any, ...]
    own_rows: tuple[int, ...]
    first_rows: tuple[int, ...]
    lost: tuple[str, ...] = ()


class _ReplicaRows:
    """The rows of one replica: the indices of its examples, their arrays, and the bad rows."""

    def __init__(self, examples: np.ndarray, first: int, counts: bool, source: Source) -> None:
        self.examples, self.first, self.counts = examples, first, counts
        self.data = empty_rows(source.specs, len(examples))
        # Why each bad row cannot be read. One thread reads a piece, so no two threads write one
        # key.
        self.bad: dict[int, str] = {}

    def views(self, rows: slice) -> Any:
        """Returns views of the arrays of some rows."""
        return map_nest(lambda array: array[rows], self.data)


class _PendingBatch(NamedTuple):
    """A batch that is being read, with a future for each piece."""

    part: WorkerPart
    replicas: list[_ReplicaRows]
    pieces: list[Future[None]]


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
        placement: the worker's replicas.
        reading: the number of threads, and whether bad examples are left out.
    """

    def __init__(
        self, source: Source, plan: BatchPlan, placement: ReplicaRange, reading: ReadOptions
    ) -> None:
        self._source, self._plan, self._placement = source, plan, placement
        self._reading, self._threads = reading, reading.threads
        self._has_all_replicas = placement.local_replicas == placement.replicas
        self._cores = cores()
        self._is_warm = False
        self._thread_pool: ThreadPoolExecutor | None = None
        self._substitute: Any = None
        self._is_stopped = False
        # What the run ends with if the storage or the source has failed. Nothing is read then.
        self._fault = ""
        # The lock makes sure that no piece is begun after `stop`.
        self._lock = threading.RLock()

    @property
    def skips_bad(self) -> bool:
        """Whether examples that cannot be read are left out."""
        return self._reading.skips_bad

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
        pending: deque[_PendingBatch] = deque()
        try:
            while True:
                while len(pending) < (AHEAD if self._threads else 1):
                    pending.append(self._begin(first_step))
                    first_step += 1
                yield self._finished(pending.popleft())
        finally:
            if self._thread_pool is not None:
                self._thread_pool.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Ends the reading soon. Another thread may call it.

        Pieces that have not been begun are not read. The generator of `batches` then raises
        `concurrent.futures.CancelledError`.
        """
        with self._lock:
            self._is_stopped = True
            if self._thread_pool is not None:
                self._thread_pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> _PendingBatch:
        """Starts to read a batch."""
        placement = self._placement
        part = self._plan.part(
            step, placement.first_replica, placement.local_replicas, placement.replicas
        )
        examples = self._plan.examples_of(part)
        batch = _PendingBatch(part, [], [])
        pieces = _PIECES_PER_THREAD * (self._cores if self._threads is None else self._threads)
        for first, last, counts in part.slices:
            replica_examples = examples[first - part.begin : last - part.begin]
            replica = _ReplicaRows(replica_examples, first, counts, self._source)
            batch.replicas.append(replica)
            for piece in _pieces(last - first, pieces * (last - first) / (part.end - part.begin)):
                batch.pieces.append(self._start(replica, part.epoch, piece))
        return batch

    def _start(self, replica: _ReplicaRows, epoch: int, piece: slice) -> Future[None]:
        """Gives a piece to the thread pool, or reads it now and measures if threads are needed."""
        with self._lock:
            if self._is_stopped:
                raise CancelledError
            if self._threads and self._thread_pool is None:
                self._thread_pool = ThreadPoolExecutor(self._threads, "tfmulti-reader")
            if self._thread_pool is not None:
                return self._thread_pool.submit(self._read, replica, epoch, piece)
        done: Future[None] = Future()
        done.set_result(None)
        started = time.perf_counter()
        self._read(replica, epoch, piece)
        if self._threads is None and self._is_warm:
            seconds = (time.perf_counter() - started) / (piece.stop - piece.start)
            self._threads = self._cores if seconds * len(replica.examples) > QUICK_S else 0
        # The first piece opens files and imports modules, so its time is not measured.
        self._is_warm = True
        return done

    def _read(self, replica: _ReplicaRows, epoch: int, piece: slice) -> None:
        """Reads a piece into its arrays, and notes the rows that cannot be read."""
        if self._fault:
            self._note(replica, piece, self._fault)
            return

        def read(rows: slice) -> None:
            self._source.read_into(replica.examples[rows], epoch, replica.views(rows))

        try:
            read(piece)
        except RECORD_FAULTS:
            # The error may concern any row of the piece, so the rows are read one by one.
            for row in range(piece.start, piece.stop):
                if self._fault:
                    self._note(replica, slice(row, piece.stop), self._fault)
                    break
                try:
                    read(slice(row, row + 1))
                except Exception as error:
                    self._on_error(replica, slice(row, row + 1), error)
        except Exception as error:
            self._on_error(replica, piece, error)

    def _note(self, replica: _ReplicaRows, rows: slice, message: str) -> None:
        """Makes some rows zeros, and notes why the first of them cannot be read."""
        map_nest(_clear, replica.views(rows))
        replica.bad[rows.start] = message

    def _on_error(self, replica: _ReplicaRows, rows: slice, error: Exception) -> None:
        """Notes that a row cannot be read, or raises the error if that ends the run.

        A bad record is noted if it may be left out. An error of the storage or of the source's code
        concerns more than one record, so it always ends the run. With several workers and no
        `skip_bad_records`, either kind of error is noted as a bad row, and the step tells the other
        workers. Otherwise it is raised here, and other workers notice that this one ends.

        Args:
            replica: the rows of the replica.
            rows: the rows that were read; the message names the first of them.
            error: what reading them has raised.
        """
        message = f"{self._source.where(int(replica.examples[rows.start]))}: {reason_of(error)}"
        is_bad_record = isinstance(error, RECORD_FAULTS) and not is_of_storage(error)
        if is_bad_record:
            can_go_on, next_step = self.skips_bad, self._reading.next_step
        elif isinstance(error, OSError):
            can_go_on = False
            next_step = "The storage failed, not a single record. Make it available again."
        else:
            can_go_on, source = False, type(self._source).__name__
            next_step = f"{source}.read() raised {type(error).__name__}, which no record causes."
        others_must_know = not (self.skips_bad or self._has_all_replicas)
        if can_go_on or others_must_know:
            message = message if can_go_on else f"{message} {next_step}"
            if not is_bad_record:
                # Each other read would fail, too, and may take minutes.
                self._fault = message
            self._note(replica, rows, message)
        elif isinstance(error, RECORD_FAULTS):
            raise DataError(f"{message} {next_step}") from error
        else:
            error.add_note(f"{message} {next_step}")
            raise error

    def _finished(self, batch: _PendingBatch) -> Batch:
        """Waits for the pieces of a batch, and returns the batch."""
        for piece in batch.pieces:
            piece.result()
        replicas, rows = batch.replicas, batch.part.rows
        own_rows = tuple(
            (len(r.examples) - len(r.bad) * self.skips_bad) * r.counts for r in replicas
        )
        first_rows = tuple(r.first for r in replicas)
        # After a fault of the storage each piece has the same sentence.
        lost = tuple(
            dict.fromkeys(r.bad[row] for r in replicas if r.counts for row in sorted(r.bad))
        )
        if lost and self._has_all_replicas:
            rows = sum(own_rows)
            ends = itertools.accumulate(own_rows)
            first_rows = tuple(
                min(end - count, max(rows - 1, 0))
                for end, count in zip(ends, own_rows, strict=True)
            )
        data = tuple(self._readable(replica) for replica in replicas)
        return Batch(batch.part.step, rows, data, own_rows, first_rows, lost)

    def _readable(self, replica: _ReplicaRows) -> Any:
        """Returns the rows of a replica without the skipped ones, but at least one row."""
        if not (replica.bad and self.skips_bad):
            return replica.data
        good = [row for row in range(len(replica.examples)) if row not in replica.bad]
        return map_nest(lambda a: a[good], replica.data) if good else self._any_example()

    def _any_example(self) -> Any:
        """Returns one example that can be read, with a leading dimension of 1."""
        tried = min(self._plan.examples, 1 + self._reading.skip_bad_records)
        for index in range(tried):
            if self._substitute is None:
                with contextlib.suppress(*RECORD_FAULTS):
                    self._substitute = self._source.read(np.array([index]))
        if self._substitute is None:
            raise DataError(f"none of the first {tried} examples can be read. Check the files.")
        return self._substitute


def cores(env: Mapping[str, str] = os.environ) -> int:
    """Returns how many cores this process may use; workers of one machine share its cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_workers(env))


def local_workers(env: Mapping[str, str] = os.environ) -> int:
    """Returns how many workers the launcher has started on this machine; 1 without the launcher."""
    workers = env.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(workers)) if workers.isdecimal() else 1


def _clear(rows: np.ndarray) -> None:
    """Sets rows to zeros, or to empty texts."""
    rows[...] = "" if rows.dtype == object else 0


def _pieces(rows: int, wanted: float) -> list[slice]:
    """Returns slices that cut the rows into about `wanted` pieces of at least one row."""
    count = max(1, min(rows, round(wanted)))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
