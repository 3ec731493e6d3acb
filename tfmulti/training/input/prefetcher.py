"""Prefetches this worker's rows of each global batch from a source, without end.

A thread runs a few batches ahead of the steps. It puts the batches into one of TensorFlow's queues,
and the compiled step takes them from there. The position in the data is one number, the step.

    RowPrefetcher     rows of any source, which a `Loader` reads, in a `BatchQueue`
    IndexPrefetcher   indices of examples, for arrays in memory, in an `IndexQueue`; the step
                      gathers the rows
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
from tfmulti.data.buffers import ALIGNMENT, bytes_of, empty
from tfmulti.data.loader import Batch, Loader
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

# Arrays with more bytes are not copied to a tensor from which the step gathers rows.
MOST_COPIED = 1 << 30
# The number of bytes of the indices that are computed together.
_BLOCK_BYTES = 1 << 17

DEFAULT = ReadOptions()


def prefetcher_of(
    source: Source,
    plan: BatchPlan,
    placement: Placement,
    first_step: int = 0,
    reading: ReadOptions = DEFAULT,
) -> Prefetcher:
    """Returns a prefetcher of this worker's part of a plan's batches.

    Close the prefetcher when no step needs it any more.

    Args:
        source: the examples.
        plan: the order of the examples.
        placement: this process' place among the workers.
        first_step: the step of the first batch, counted over all epochs.
        reading: how the examples are read.
    """
    arrays = source.arrays()
    if arrays is not None and reading.threads is None and bytes_of(arrays.data) <= MOST_COPIED:
        return IndexPrefetcher(arrays, plan, placement, first_step)
    return RowPrefetcher(source, plan, placement, first_step, reading)


class Prefetcher(ABC):
    """A queue of batches, and the thread that fills it.

    Attributes:
        queue: the `BatchQueue` or `IndexQueue` from which the step takes the batches.
        error: the reason why the data cannot be read on, or None.
        lost: one sentence for each example that could not be read and was left out.
        is_closed: whether `close` was called.
    """

    queue: Any

    def __init__(self, queue: tf.queue.QueueBase) -> None:
        self.error: Exception | None = None
        self.lost: set[str] = set()
        self.is_closed = False
        self._tf_queue = queue
        self._reader: Loader | None = None

    def _start(self, elements: Iterator[Any]) -> None:
        """Starts the thread that puts the given elements into the queue."""
        # The thread has only a weak reference, so that a prefetcher that nobody uses is collected.
        self._thread = threading.Thread(
            target=_fill,
            args=(weakref.ref(self), elements, self._tf_queue),
            name="tfmulti-feeder",
            daemon=True,
        )
        self._thread.start()

    @property
    @abstractmethod
    def threads(self) -> int | None:
        """The number of threads that read examples, or None before the first was read."""

    def take(self) -> WorkerBatch:
        """Returns the next batch, for code outside of a step.

        Raises:
            DataError: the data cannot be read on.
            tf.errors.OutOfRangeError: the prefetcher was closed.
        """
        try:
            batch: WorkerBatch = self.queue.take()
        except tf.errors.OutOfRangeError:
            if self.error is not None:
                raise self.error from None
            raise
        return batch

    def close(self) -> None:
        """Ends the threads, and drops the batches in the queue."""
        self.is_closed = True
        if self._reader is not None:
            self._reader.stop()
        # Operations in `init_scope` run at once, even if Python collects a prefetcher while a step
        # is traced.
        with tf.init_scope():
            if self._thread is not threading.current_thread():
                self._wait_for_thread()
            # The thread has closed the queue itself if the data could not be read on.
            if not self._tf_queue.is_closed():
                self._tf_queue.close()

    def _wait_for_thread(self) -> None:
        """Takes from the queue until the thread that fills it has seen `is_closed` and ended.

        Cancelling the operation in which the thread waits would end it, too, but TensorFlow logs
        that as an error.
        """
        while self._thread.is_alive():
            if self._tf_queue.size():
                self._tf_queue.dequeue()
            else:
                self._thread.join(0.001)

    def __del__(self) -> None:
        # Parts of TensorFlow may be gone when the interpreter ends.
        with contextlib.suppress(Exception):
            self.close()


class RowPrefetcher(Prefetcher):
    """A prefetcher of rows of any source.

    At most `PREFETCH_STEPS` batches wait in the queue. The batches that the loader makes
    (`loader.AHEAD`) come on top.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        placement: Placement,
        first_step: int = 0,
        reading: ReadOptions = DEFAULT,
    ) -> None:
        are_even = plan.is_even and not reading.skips_bad
        form = specs_of(source.specs, _known_rows(placement, plan.global_batch_size, are_even))
        types = [spec.dtype for spec in leaves_of(form)] * placement.local_replicas
        with tf.device("CPU:0"):
            super().__init__(tf.queue.FIFOQueue(PREFETCH_STEPS, [*types, tf.int64]))
        self.queue: BatchQueue = queue_of(self._tf_queue, form, placement.local_replicas)
        reader = self._reader = Loader(source, plan, placement, reading)
        self._start(_rows_read(weakref.ref(self), reader, first_step))

    @property
    def threads(self) -> int | None:
        return self._reader.threads if self._reader is not None else None


class IndexPrefetcher(Prefetcher):
    """A prefetcher of the indices of examples in arrays, of which TensorFlow gets a copy.

    Copying a row takes less time than handing it from one thread to another. So only the indices
    are computed ahead, for many steps at a time, and the step copies the rows.
    """

    # Only the thread that fills the queue works.
    threads = 0

    def __init__(
        self, arrays: Arrays, plan: BatchPlan, placement: Placement, first_step: int = 0
    ) -> None:
        local = placement.local_replicas
        rows_per_replica = -(-plan.global_batch_size // placement.replicas)
        at_a_time = max(1, min(64, _BLOCK_BYTES // (8 * local * rows_per_replica)))
        with tf.device("CPU:0"):
            data = map_nest(_copied, arrays.data)
            shapes = [[local, rows_per_replica], [3 * local + 1]]
            super().__init__(tf.queue.FIFOQueue(2 * at_a_time, [tf.int64, tf.int64], shapes))
        known = _known_rows(placement, plan.global_batch_size, plan.is_even)
        self.queue: IndexQueue = index_queue_of(
            self._tf_queue, data, specs_of(arrays.specs, known), local
        )
        self._start(_indices(arrays, plan, placement, first_step, at_a_time))


def _copied(array: np.ndarray) -> tf.Tensor:
    """Returns a copy of an array as a tensor, in a third of the time that TensorFlow takes."""
    if array.dtype.kind not in "iuf":
        return tf.convert_to_tensor(array)
    copy = empty(array.shape, array.dtype.name)
    copy[...] = array
    return as_tensor(copy)


def _known_rows(placement: Placement, rows: int, are_even: bool) -> int | None:
    """Returns the number of rows of each batch, or None if a traced step must not know it.

    With one replica it is known if all batches have as many rows. With several it stays unknown: an
    axis of known size is then no axis of rows (`randomness`).
    """
    return rows if are_even and placement.replicas == 1 else None


def _fill(
    reference: weakref.ref[Prefetcher], elements: Iterator[Any], queue: tf.queue.QueueBase
) -> None:
    """Puts elements into the queue until the prefetcher is closed; runs in the thread."""
    with contextlib.closing(elements):  # type: ignore[type-var]
        try:
            for components, are_several in elements:
                (queue.enqueue_many if are_several else queue.enqueue)(components)
                prefetcher = reference()
                if prefetcher is None or prefetcher.is_closed:
                    return
                del prefetcher
        except (tf.errors.CancelledError, CancelledError):
            # The prefetcher was closed.
            pass
        except Exception as error:
            prefetcher = reference()
            # Reading that is stopped halfway may raise an error, too.
            if prefetcher is None or prefetcher.is_closed:
                return
            prefetcher.error = error
            # The step still gets the batches in the queue. After these it finds that there are no
            # more.
            queue.close()


def _rows_read(
    reference: weakref.ref[RowPrefetcher], reader: Loader, first_step: int
) -> Iterator[Any]:
    """Yields one element of a `BatchQueue` at a time, and False, which says that it is one."""
    with contextlib.closing(reader.batches(first_step)) as batches:
        for batch in batches:
            if reader.skips_bad:
                _print_lost(reference(), batch)
            else:
                _note_error(reference(), batch)
            tensors = [as_tensor(leaf) for data in batch.data for leaf in leaves_of(data)]
            counts = [*batch.own_rows, *batch.first_rows, batch.rows, len(batch.lost)]
            yield [*tensors, tf.constant(counts, tf.int64)], False


def _indices(
    arrays: Arrays, plan: BatchPlan, placement: Placement, step: int, at_a_time: int
) -> Iterator[Any]:
    """Yields several elements of an `IndexQueue` at a time, and True, which says so."""
    local, replicas = placement.local_replicas, placement.replicas
    rows_per_replica = -(-plan.global_batch_size // replicas)
    while True:
        indices = np.zeros((at_a_time, local, rows_per_replica), np.int64)
        counts = np.zeros((at_a_time, 3 * local + 1), np.int64)
        for i in range(at_a_time):
            part = plan.part(step + i, placement.first_replica, local, replicas)
            examples = arrays.rows_of(plan.examples_of(part))
            for k, (start, stop, counts_rows) in enumerate(part.slices):
                indices[i, k, : stop - start] = examples[start - part.begin : stop - part.begin]
                counts[i, k::local][:3] = stop - start, (stop - start) * counts_rows, start
            counts[i, -1] = part.rows
        step += at_a_time
        yield [indices, counts], True


def _print_lost(prefetcher: RowPrefetcher | None, batch: Batch) -> None:
    """Prints once for each example that it was left out."""
    for message in batch.lost:
        if prefetcher is not None and message not in prefetcher.lost:
            prefetcher.lost.add(message)
            left_out(message)


def _note_error(prefetcher: RowPrefetcher | None, batch: Batch) -> None:
    """Stores the error of the first example that cannot be read; the step tells other workers."""
    if batch.lost and prefetcher is not None and prefetcher.error is None:
        prefetcher.error = DataError(batch.lost[0])


def as_tensor(array: Any) -> tf.Tensor:
    """Returns an array as a tensor, in the same memory if TensorFlow can use it.

    Args:
        array: a NumPy array, or anything else that TensorFlow converts. Nothing may write to it
            afterwards.
    """
    is_numeric = isinstance(array, np.ndarray) and array.dtype.kind in "iuf" and array.size
    if is_numeric and array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def specs_of(specs: Any, rows: int | None) -> Any:
    """Returns the form of several examples, as a nest of `tf.TensorSpec`.

    Args:
        specs: the form of one example, a nest of `data.source.Leaf`.
        rows: the number of examples; None for any number.
    """

    def spec(leaf: Leaf) -> tf.TensorSpec:
        dtype = tf.string if leaf.dtype == "str" else tf.as_dtype(leaf.dtype)
        return tf.TensorSpec([rows, *leaf.shape], dtype)

    return map_nest(spec, specs)
