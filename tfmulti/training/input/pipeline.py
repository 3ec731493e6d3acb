"""Reads the global batches of a `tf.data.Dataset` ahead, and cuts them to this worker's rows.

An iterator of the Dataset gives global batches, the same on every worker. The step cuts a batch
when it takes it. So the buffers of the iterator are the same on all workers, and a saved position
is valid for any number of workers (`positions`).

tf.data's autotuner is switched off, and parallelism is set by number. The autotuner's period
doubles up to 60 s. It can make the end of a run wait for as long as the run took.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmulti.data import sharding
from tfmulti.distribution.agreement import MOST_EXACT
from tfmulti.distribution.replica_context import rows_of
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.training.input.worker_batch import PREFETCH_STEPS, WorkerBatch

DIFFERENT_ROWS = "the parts of a batch have different numbers of rows"


def read_ahead(dataset: tf.data.Dataset, batches: int = PREFETCH_STEPS) -> tf.data.Dataset:
    """Returns the same batches, of which the next `batches` are read while a step runs."""
    options = tf.data.Options()
    # A user who has set this option keeps the choice.
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A position would lack the random numbers of such a Dataset. With FAIL TensorFlow refuses to
    # save one (`positions`).
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
    return (dataset.prefetch(batches) if batches else dataset).with_options(options)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def from_batch(batch: Any, placement: Placement) -> WorkerBatch:
    """Returns this worker's `WorkerBatch` of one global batch.

    The batch is a nest of tensors, dense, ragged or sparse, with the rows on the first axis.
    """
    # Without this dependency another operation would fail first, with a message of its own.
    with tf.control_dependencies(_checks(batch)):
        batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
    rows = _rows(batch)
    zero = tf.constant(0, tf.int64)
    if placement.replicas == 1:
        return WorkerBatch((batch,), (rows,), (zero,), rows, tf.constant(-1), zero)
    data, own_rows, first_rows = [], [], []
    for local in range(placement.local_replicas):
        replica = tf.constant(placement.first_replica + local, tf.int64)
        start, stop = sharding.slice_bounds(rows, placement.replicas, replica, tf.minimum)
        begin, end = sharding.rows_to_read(start, stop, rows, tf.minimum)
        data.append(rows_of(batch, begin, end))
        own_rows.append(stop - start)
        first_rows.append(begin)
    digest = _digest(batch) if placement.workers > 1 else tf.constant(-1)
    return WorkerBatch(tuple(data), tuple(own_rows), tuple(first_rows), rows, digest, zero)


def _rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of the first part of a batch, int64 scalar."""
    leaf = next(t for t in tf.nest.flatten(batch) if t is not None)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def check_known_rows(specs: Any) -> None:
    """Raises an error if the form of the batches shows that they cannot be cut into rows.

    Raises:
        DataError: a part has no rows, or two parts have different numbers of rows.
    """
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if spec is not None]
    if any(shape.rank == 0 for shape in shapes):
        raise DataError(
            "a part of the Dataset's batches is one number, without rows. Batch the Dataset: "
            "dataset.batch(global_batch_size)."
        )
    if len({shape[0] for shape in shapes if shape.rank and shape[0] is not None}) > 1:
        raise DataError(different_rows())


def different_rows() -> str:
    """Returns the message for parts with different numbers of rows, with what to do."""
    return (
        f"{DIFFERENT_ROWS}, so they cannot be shared out by rows. Give each part one row for "
        "each example; what belongs to all examples belongs into the model."
    )


def _checks(batch: Any) -> list[Any]:
    """Returns operations that fail if the parts of a batch have different numbers of rows."""
    first, *rest = (_rows(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None)
    checks = (tf.debugging.assert_equal(rows, first, message=DIFFERENT_ROWS) for rows in rest)
    # There is no operation if the check has run at once, or if both numbers are known.
    return [check for check in checks if check is not None]


def _digest(batch: Any) -> tf.Tensor:
    """Returns an int32 below `MOST_EXACT` that shows whether workers read different batches.

    The number is a hash of the number of rows, of the first and the last row, and of the lengths of
    texts. This hash is cheap, and a shuffle without a seed changes it.
    """
    sums = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string:
            ends = tf.concat([leaf[:1], leaf[-1:]], 0)
            sums.append(tf.reduce_sum(tf.cast(ends, tf.float64)))
        elif isinstance(leaf, tf.Tensor):
            sums.append(tf.reduce_sum(tf.cast(tf.strings.length(leaf), tf.float64)))
    text = tf.strings.as_string(tf.stack([tf.cast(_rows(batch), tf.float64), *sums]))
    digest = tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(text), MOST_EXACT)
    return tf.cast(digest, tf.int32)
