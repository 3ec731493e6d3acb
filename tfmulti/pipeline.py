"""Turns data into this worker's part of each global batch.

Two ways in, one form out (`Shards`):

- a source with random access (`Stream`): the plan says which examples global batch `k` holds,
  a reader reads this worker's rows alone, and a thread puts them into a queue of TensorFlow's,
  out of which the compiled step takes them. The position is one number, the steps so far.
- a `tf.data.Dataset` of global batches: every worker reads it and keeps its own rows.

Nothing here is tuned while it runs: tf.data's autotuner makes the end of a run wait for up
to as long as the run took (its period doubles up to 60 s), so it is switched off and
parallelism is set by number.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti import sharding
from tfmulti.errors import DataError
from tfmulti.plan import Plan
from tfmulti.reader import ALIGNMENT, Batch, Reader
from tfmulti.reading import Reading
from tfmulti.replicas import rows_of
from tfmulti.sources.source import Leaf, Source, leaves_of, map_nest
from tfmulti.steps import Shards
from tfmulti.strategies import Placement

PREFETCH_STEPS = 2  # batches that wait for the step; the reader makes others meanwhile

DEFAULT = Reading()

DIFFERENT_ROWS = "the parts of a batch have different numbers of rows"


class Stream:
    """This worker's `Shards` of a source, from a step on, without end.

    It holds at most `PREFETCH_STEPS` batches that wait, and those that the reader makes
    (`reader.AHEAD`). A thread fills the queue until `close`.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        placement: Placement,
        first_step: int = 0,
        reading: Reading = DEFAULT,
    ) -> None:
        self._reader = Reader(source, plan, placement, reading)
        self._placement = placement
        self.error: Exception | None = None
        self.lost: set[str] = set()  # what could not be read, in words
        # One replica's rows are known beforehand where all batches are alike. Those of several
        # are not said, so that an axis of known size is none of rows (`randomness`).
        alone = placement.replicas == 1 and plan.is_even and not reading.skip_bad_records
        rows = plan.global_batch_size if alone else None
        self._form = specs_of(source, rows)
        types = [spec.dtype for spec in leaves_of(self._form)] * placement.local_replicas
        with tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(PREFETCH_STEPS, [*types, tf.int64])
        self.shards = iter(_untuned(tf.data.Dataset.counter().map(self._taken)))
        self._thread = threading.Thread(
            target=_fill,
            args=(weakref.ref(self), self._reader, self._queue, first_step),
            name="tfmulti-feeder",
            daemon=True,
        )
        self._thread.start()

    @property
    def threads(self) -> int | None:
        """How many threads read examples; None before the first was read."""
        return self._reader.threads

    def close(self) -> None:
        """Ends the threads. What is in the queue is dropped."""
        with tf.init_scope():  # at once, also where a stream is collected while a step is traced
            self._queue.close(cancel_pending_enqueues=True)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _taken(self, _: tf.Tensor) -> Shards:
        *parts, counts = self._queue.dequeue()
        local = self._placement.local_replicas
        size = len(parts) // local
        data = []
        for i in range(local):
            own = parts[i * size : (i + 1) * size]
            for tensor, spec in zip(own, leaves_of(self._form), strict=True):
                tensor.set_shape(spec.shape)
            data.append(tf.nest.pack_sequence_as(self._form, own))
        counts.set_shape([2 * local + 2])
        *numbers, rows, lost = tf.unstack(counts)
        own_rows, first_rows = tuple(numbers[:local]), tuple(numbers[local:])
        return Shards(tuple(data), own_rows, first_rows, rows, tf.constant(-1), lost)


def _fill(
    stream: weakref.ref[Stream], reader: Reader, queue: tf.queue.QueueBase, first_step: int
) -> None:
    """Runs in a thread: puts batch after batch into the queue, until that is closed."""
    with contextlib.closing(reader.batches(first_step)) as batches:
        try:
            for batch in batches:
                _say_lost(stream(), batch)
                queue.enqueue(_components(batch))
        except tf.errors.CancelledError:
            pass  # closed
        except Exception as error:
            holder = stream()
            if holder is not None:
                holder.error = error
            queue.close()  # what is in it is still taken, and then the step finds no more


def _say_lost(stream: Stream | None, batch: Batch) -> None:
    for words in batch.lost:
        if stream is not None and words not in stream.lost:
            stream.lost.add(words)
            print(f"tfmulti: left out {words}", file=sys.stderr, flush=True)


def _components(batch: Batch) -> list[tf.Tensor]:
    tensors = [as_tensor(leaf) for data in batch.data for leaf in leaves_of(data)]
    counts = [*batch.own_rows, *batch.first_rows, batch.rows, len(batch.lost)]
    return [*tensors, tf.constant(counts, tf.int64)]


def as_tensor(array: Any) -> tf.Tensor:
    """Returns an array as a tensor: the same memory, where TensorFlow can take that.

    Nothing may write to the array afterwards.
    """
    plain = isinstance(array, np.ndarray) and array.dtype.kind in "iuf" and array.size
    if plain and array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def specs_of(source: Source, rows: int | None) -> Any:
    """Returns the form of so many rows of a source (None: any number), in TensorFlow's words."""

    def spec(leaf: Leaf) -> tf.TensorSpec:
        dtype = tf.string if leaf.dtype == "str" else tf.as_dtype(leaf.dtype)
        return tf.TensorSpec([rows, *leaf.shape], dtype)

    return map_nest(spec, source.specs)


def from_dataset(dataset: tf.data.Dataset, placement: Placement) -> tf.data.Dataset:
    """Returns this worker's `Shards` of a dataset of global batches, with the same length."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def shards(*batch: Any) -> Shards:
        return from_batch(batch if len(batch) > 1 else batch[0], placement)

    _check_known_rows(dataset.element_spec)
    return _untuned(dataset.map(shards, num_parallel_calls=1).prefetch(PREFETCH_STEPS))


def from_batch(batch: Any, placement: Placement) -> Shards:
    """Returns this worker's `Shards` of one global batch of tensors."""
    rows = _checked_rows(batch)
    data, own_rows, first_rows = [], [], []
    for local in range(placement.local_replicas):
        replica = tf.constant(placement.first_replica + local, tf.int64)
        start, stop = sharding.share_bounds(rows, placement.replicas, replica, tf.minimum)
        begin, end = sharding.rows_to_read(start, stop, rows, tf.minimum)
        data.append(rows_of(batch, begin, end))
        own_rows.append(stop - start)
        first_rows.append(begin)
    digest = _digest(batch) if placement.workers > 1 else tf.constant(-1)
    nothing = tf.constant(0, tf.int64)
    return Shards(tuple(data), tuple(own_rows), tuple(first_rows), rows, digest, nothing)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    if dataset.options().autotune.enabled is None:  # a user who set it keeps it
        options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # An iterator whose random numbers a position would not hold has none (`positions`).
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
    return dataset.with_options(options)


def _rows(batch: Any) -> tf.Tensor:
    leaf = next(t for t in tf.nest.flatten(batch) if t is not None)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def _check_known_rows(specs: Any) -> None:
    """Raises DataError where it is known beforehand that the parts differ in their rows."""
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if spec is not None]
    if any(shape.rank == 0 for shape in shapes):
        raise DataError(
            "a part of the Dataset's batches is one number, without rows. Batch the Dataset: "
            "dataset.batch(global_batch_size)."
        )
    if len({shape[0] for shape in shapes if shape.rank and shape[0] is not None}) > 1:
        raise DataError(different_rows())


def different_rows() -> str:
    """Returns what is wrong with such a batch, and what to do."""
    return (
        f"{DIFFERENT_ROWS}, so they cannot be shared out by rows. Give each part one row for "
        "each example; what belongs to all examples belongs into the model."
    )


def _checked_rows(batch: Any) -> tf.Tensor:
    """Returns the rows of a batch, or fails where its parts have different numbers of them."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    rows = _rows(leaves[0])
    for leaf in leaves[1:]:
        tf.debugging.assert_equal(_rows(leaf), rows, message=DIFFERENT_ROWS)
    return rows


def _digest(batch: Any) -> tf.Tensor:
    """Returns a number in 0..255 by which workers notice that they read different batches.

    It is made of the first and the last row: cheap, and a shuffle without a seed changes it.
    """
    words = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string:
            ends = tf.concat([leaf[:1], leaf[-1:]], 0)
            words.append(tf.reduce_sum(tf.cast(ends, tf.float64)))
        elif isinstance(leaf, tf.Tensor):
            words.append(tf.reduce_sum(tf.cast(tf.strings.length(leaf), tf.float64)))
    text = tf.strings.as_string(tf.stack([tf.cast(_rows(batch), tf.float64), *words]))
    return tf.cast(tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(text), 256), tf.int32)
