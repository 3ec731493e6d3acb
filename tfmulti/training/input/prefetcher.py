"""From a source to the compiled step: this worker's rows of each global batch, without end.

A thread runs ahead of the steps by a few batches and puts what it makes into a queue of
TensorFlow's, out of which the compiled step takes (`shards.Outlet`). The position is one number,
the steps so far.

    Stream        examples, read by a `Loader`
    ArrayStream   numbers of examples, for arrays in memory: the step itself gathers the rows
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.config.console import left_out
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.loader import ALIGNMENT, Batch, Loader, bytes_of, empty
from tfmulti.data.source import Arrays, Leaf, Source, leaves_of, map_nest
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.training.input.worker_batch import (
    PREFETCH_STEPS,
    BatchQueue,
    IndexQueue,
    WorkerBatch,
    index_queue_of,
    queue_of,
)

MOST_COPIED = 1 << 30  # bytes of arrays that TensorFlow gets a copy of, to gather from
_BLOCK_BYTES = 1 << 17  # of examples' numbers that are planned at a time

DEFAULT = ReadOptions()


def prefetcher_of(
    source: Source,
    plan: BatchPlan,
    placement: Placement,
    first_step: int = 0,
    reading: ReadOptions = DEFAULT,
) -> Prefetcher:
    """Returns this worker's part of a plan's batches from a step on. Close it when it is done."""
    arrays = source.arrays()
    if arrays is not None and reading.threads is None and bytes_of(arrays.data) <= MOST_COPIED:
        return IndexPrefetcher(arrays, plan, placement, first_step)
    return RowPrefetcher(source, plan, placement, first_step, reading)


class Prefetcher(ABC):
    """A queue of batches, and the thread that fills it.

    `shards` is where the step takes them. `error` is why the data cannot be read on, if that
    is so, and `lost` what could not be read, in words.
    """

    shards: Any

    def __init__(self, queue: tf.queue.QueueBase) -> None:
        self.error: Exception | None = None
        self.lost: set[str] = set()
        self.is_closed = False
        self._queue = queue
        self._reader: Loader | None = None

    def _start(self, filled: Iterator[Any]) -> None:
        self._thread = threading.Thread(
            target=_fill,
            args=(weakref.ref(self), filled, self._queue),
            name="tfmulti-feeder",
            daemon=True,
        )
        self._thread.start()

    @property
    @abstractmethod
    def threads(self) -> int | None:
        """How many threads read examples; None before the first was read."""

    def take(self) -> WorkerBatch:
        """Returns the next batch, outside of a step.

        Raises:
            DataError: the data cannot be read on.
        """
        try:
            found: WorkerBatch = self.shards.take()
        except tf.errors.OutOfRangeError:
            if self.error is not None:
                raise self.error from None
            raise
        return found

    def close(self) -> None:
        """Ends the threads. What is in the queue is dropped."""
        self.is_closed = True
        if self._reader is not None:
            self._reader.stop()
        with tf.init_scope():  # at once, also where a stream is collected while a step is traced
            if self._thread is not threading.current_thread():
                self._wait_for_thread()
            if not self._queue.is_closed():  # the thread closes it where the data ends or fails
                self._queue.close()

    def _wait_for_thread(self) -> None:
        """Takes from the queue until the thread that fills it has seen that it is closed.

        To cancel what the thread waits for would end it, too, but TensorFlow logs that as an error.
        """
        while self._thread.is_alive():
            if self._queue.size():
                self._queue.dequeue()
            else:
                self._thread.join(0.001)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()


class RowPrefetcher(Prefetcher):
    """Examples of any source.

    It holds at most `PREFETCH_STEPS` batches that wait, and those that the reader makes
    (`reader.AHEAD`).
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        placement: Placement,
        first_step: int = 0,
        reading: ReadOptions = DEFAULT,
    ) -> None:
        alike = plan.is_even and not reading.skip_bad_records
        form = specs_of(source.specs, _known_rows(placement, plan.global_batch_size, alike))
        types = [spec.dtype for spec in leaves_of(form)] * placement.local_replicas
        with tf.device("CPU:0"):
            super().__init__(tf.queue.FIFOQueue(PREFETCH_STEPS, [*types, tf.int64]))
        self.shards: BatchQueue = queue_of(self._queue, form, placement.local_replicas)
        reader = self._reader = Loader(source, plan, placement, reading)
        self._start(_components(weakref.ref(self), reader, first_step))

    @property
    def threads(self) -> int | None:
        return self._reader.threads if self._reader is not None else None


class IndexPrefetcher(Prefetcher):
    """Rows of arrays in memory, of which TensorFlow gets a copy.

    A row is copied in less time than threads take to hand it over, so only the numbers of the
    examples are made ahead, of many steps at a time.
    """

    threads = 0  # none but the one that plans

    def __init__(
        self, arrays: Arrays, plan: BatchPlan, placement: Placement, first_step: int = 0
    ) -> None:
        local = placement.local_replicas
        most = -(-plan.global_batch_size // placement.replicas)
        at_a_time = max(1, min(64, _BLOCK_BYTES // (8 * local * most)))
        with tf.device("CPU:0"):
            data = map_nest(_copied, arrays.data)
            shapes = [[local, most], [3 * local + 1]]
            super().__init__(tf.queue.FIFOQueue(2 * at_a_time, [tf.int64, tf.int64], shapes))
        known = _known_rows(placement, plan.global_batch_size, plan.is_even)
        self.shards: IndexQueue = index_queue_of(
            self._queue, data, specs_of(arrays.specs, known), local
        )
        self._start(_numbers(arrays, plan, placement, first_step, at_a_time))


def _copied(array: np.ndarray) -> tf.Tensor:
    """Returns a copy of an array as a tensor; a third of the time that TensorFlow takes."""
    if array.dtype.kind not in "iuf":
        return tf.convert_to_tensor(array)
    copy = empty(array.shape, array.dtype.name)
    copy[...] = array
    return as_tensor(copy)


def _known_rows(placement: Placement, rows: int, alike: bool) -> int | None:
    """Returns how many rows each batch has, where that may be known when a step is traced.

    One replica's are known where all batches are alike. Those of several are not said, so that
    an axis of known size is none of rows (`randomness`).
    """
    return rows if alike and placement.replicas == 1 else None


def _fill(
    stream: weakref.ref[Prefetcher], filled: Iterator[Any], queue: tf.queue.QueueBase
) -> None:
    """Runs in a thread: puts what is made into the queue, until that is closed."""
    with contextlib.closing(filled):  # type: ignore[type-var]
        try:
            for components, several in filled:
                (queue.enqueue_many if several else queue.enqueue)(components)
                holder = stream()
                if holder is None or holder.is_closed:
                    return
                del holder
        except (tf.errors.CancelledError, CancelledError):
            pass  # closed
        except Exception as error:
            holder = stream()
            if holder is None or holder.is_closed:
                return  # it was stopped in the midst of something
            holder.error = error
            queue.close()  # what is in it is still taken, and then the step finds no more


def _components(
    stream: weakref.ref[RowPrefetcher], reader: Loader, first_step: int
) -> Iterator[Any]:
    """Yields the queue's elements: the leaves for each replica, and the counts."""
    with contextlib.closing(reader.batches(first_step)) as batches:
        for batch in batches:
            if reader.skips_bad:
                _say_lost(stream(), batch)
            else:
                _note_error(stream(), batch, reader.next_step)
            tensors = [as_tensor(leaf) for data in batch.data for leaf in leaves_of(data)]
            counts = [*batch.own_rows, *batch.first_rows, batch.rows, len(batch.lost)]
            yield [*tensors, tf.constant(counts, tf.int64)], False


def _numbers(
    arrays: Arrays, plan: BatchPlan, placement: Placement, step: int, at_a_time: int
) -> Iterator[Any]:
    """Yields many of the queue's elements: numbers for each replica, filled up, and the counts.

    The counts are the rows that each reads, how many of them count, where they begin in the
    global batch, and the rows of that.
    """
    local, replicas = placement.local_replicas, placement.replicas
    most = -(-plan.global_batch_size // replicas)
    while True:
        numbers = np.zeros((at_a_time, local, most), np.int64)
        counts = np.zeros((at_a_time, 3 * local + 1), np.int64)
        for i in range(at_a_time):
            part = plan.part(step + i, placement.first_replica, local, replicas)
            examples = arrays.rows_of(plan.examples_of(part))
            for k, (first, last, counted) in enumerate(part.shares):
                numbers[i, k, : last - first] = examples[first - part.begin : last - part.begin]
                counts[i, k::local][:3] = last - first, (last - first) * counted, first
            counts[i, -1] = part.rows
        step += at_a_time
        yield [numbers, counts], True


def _say_lost(stream: RowPrefetcher | None, batch: Batch) -> None:
    for words in batch.lost:
        if stream is not None and words not in stream.lost:
            stream.lost.add(words)
            left_out(words)


def _note_error(stream: RowPrefetcher | None, batch: Batch, next_step: str) -> None:
    """Makes the first example that cannot be read the stream's error; the step tells the others."""
    if batch.lost and stream is not None and stream.error is None:
        stream.error = DataError(f"{batch.lost[0]} {next_step}")


def as_tensor(array: Any) -> tf.Tensor:
    """Returns an array as a tensor: the same memory, where TensorFlow can take that.

    Nothing may write to the array afterwards.
    """
    plain = isinstance(array, np.ndarray) and array.dtype.kind in "iuf" and array.size
    if plain and array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def specs_of(specs: Any, rows: int | None) -> Any:
    """Returns the form of so many rows (None: any number) of examples, in TensorFlow's words."""

    def spec(leaf: Leaf) -> tf.TensorSpec:
        dtype = tf.string if leaf.dtype == "str" else tf.as_dtype(leaf.dtype)
        return tf.TensorSpec([rows, *leaf.shape], dtype)

    return map_nest(spec, specs)
