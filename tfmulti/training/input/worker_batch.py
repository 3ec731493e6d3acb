"""This worker's part of a global batch, and the queues from which the compiled step takes it.

    BatchQueue   a queue of rows that the host has read
    IndexQueue   a queue of examples' indices; the step gathers the rows from arrays in memory
    Ahead        one of these queues, with the next batch on its way to the GPUs

A queue is an argument of the compiled function. It is an `ExtensionType`, so another queue of the
same form does not make TensorFlow trace the function again. It names its form, and `_FORMS` has the
nest of `tf.TensorSpec` by that name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmulti.data.source import leaves_of
from tfmulti.distribution.replica_slice import ReplicaSlice, part_of
from tfmulti.errors import ModelError, without_layer

# The number of batches that wait for the step. The reader makes others meanwhile.
PREFETCH_STEPS = 2


class WorkerBatch(NamedTuple):
    """This worker's part of one global batch.

    Attributes:
        data: for each local replica the rows that it reads, a nest of tensors.
        own_rows: for each local replica how many of these rows count, int64 scalars. All count, or
            none if a replica without rows reads one (`sharding.rows_to_read`).
        first_rows: for each local replica the position of its first row in the global batch, int64
            scalars.
        rows: the number of rows of the global batch, int64 scalar.
        digest: a small whole number that is the same on all workers if they have read the same
            global batch; -1 if it is not computed.
        lost: the number of rows that this worker could not read, int64 scalar. With
            `skip_bad_records` they are left out of `data` and `own_rows`. A single worker leaves
            them out of `first_rows` and `rows`, too. Several workers must exchange their numbers
            first (`step.taking_agreed_rows`).
    """

    data: tuple[Any, ...]
    own_rows: tuple[tf.Tensor, ...]
    first_rows: tuple[tf.Tensor, ...]
    rows: tf.Tensor
    digest: tf.Tensor
    lost: tf.Tensor

    def weight(self, local: int) -> tf.Tensor:
        """Returns which part of the global batch's rows a local replica has, float64 scalar.

        It is 0 if all rows of the global batch were lost.
        """
        return part_of(self.own_rows[local], self.rows)

    def of_any_rows(self) -> WorkerBatch:
        """Returns the same batch with data whose number of rows is unknown while a step is traced.

        So a step must ask a tensor for the number. A fixed number would be that of this replica
        slice, and not of the global batch (`row_labels`).
        """
        return self._replace(data=of_any_rows(self.data))

    def slice_of(self, local: int, *, alone: bool, sync_batch_norm: bool) -> ReplicaSlice:
        """Returns the replica slice of a local replica.

        Args:
            local: the index of the replica on this worker.
            alone: whether there is no other replica, so that the slice is the whole global batch.
            sync_batch_norm: whether batch statistics are over the rows of all replicas.
        """
        return ReplicaSlice(
            self.weight(local),
            self.own_rows[local],
            self.first_rows[local],
            self.rows,
            _fixed_rows(self.data[local]),
            alone,
            sync_batch_norm,
        )


def of_any_rows(data: Any) -> Any:
    """Returns the same tensors with a number of rows that is unknown while a step is traced."""

    def with_unknown_rows(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is not None:
            return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])
        return leaf

    return tf.nest.map_structure(with_unknown_rows, data)


# What Python and TensorFlow say of None in the place of a number.
_OF_NONE = re.compile(r"NoneType|None values|\(None, ")


@contextlib.contextmanager
def unknown_rows_explained(*, are_unknown: bool) -> Iterator[None]:
    """Raises a ModelError with advice in place of an error of code that takes None for a number.

    Args:
        are_unknown: whether `of_any_rows` has made the number of rows unknown. Otherwise all errors
            stay as they are.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        message = " ".join(without_layer(str(error)).split())
        if not are_unknown or not _OF_NONE.search(message):
            raise
        raise ModelError(
            f"the step computes with None: {message[:200].rstrip('.')}. While a step for several "
            "replicas or microbatches is traced, the number of rows is unknown, so x.shape[0] is "
            "None. Take keras.ops.shape(x)[0] in its place."
        ) from error


class BatchQueue(tf.experimental.ExtensionType):  # type: ignore[misc]
    """A queue of `WorkerBatch` from which a compiled step takes the next one.

    Taking a batch from the queue costs a fifth of what an iterator of tf.data costs.

    Each element of the queue has the leaves of the rows of each local replica, and then one vector
    of counts: `own_rows`, `first_rows`, `rows` and `lost`.

    Attributes:
        handle: the handle of TensorFlow's queue.
        form: the name of a nest of `tf.TensorSpec`, the form of one replica's rows.
        replicas: the number of local replicas.
    """

    handle: tf.Tensor
    form: str
    replicas: int

    def take(self) -> WorkerBatch:
        """Returns the next batch, and waits until there is one.

        Raises:
            tf.errors.OutOfRangeError: the queue was closed, because the data cannot be read on.
        """
        nest = _FORMS[self.form]
        specs = leaves_of(nest) * self.replicas
        types = [*(spec.dtype for spec in specs), tf.int64]
        *leaves, counts = tf.raw_ops.QueueDequeueV2(handle=self.handle, component_types=types)
        leaves = [tf.ensure_shape(t, s.shape) for t, s in zip(leaves, specs, strict=True)]
        size = len(leaves) // self.replicas
        data = [
            tf.nest.pack_sequence_as(nest, leaves[i * size : (i + 1) * size])
            for i in range(self.replicas)
        ]
        counts = tf.ensure_shape(counts, [2 * self.replicas + 2])
        *numbers, rows, lost = tf.unstack(counts)
        own_rows, first_rows = numbers[: self.replicas], numbers[self.replicas :]
        return WorkerBatch(
            tuple(data), tuple(own_rows), tuple(first_rows), rows, tf.constant(-1), lost
        )


class IndexQueue(tf.experimental.ExtensionType):  # type: ignore[misc]
    """A queue of examples' indices, for which a compiled step gathers the rows.

    Each element of the queue has the indices of each local replica, padded to one length, and one
    vector of counts. The counts are the rows that each replica reads, how many of them count, where
    they begin, and the rows of the global batch.

    Attributes:
        handle: the handle of TensorFlow's queue.
        arrays: the leaves of all examples, in the host's memory.
        form: the name of a nest of `tf.TensorSpec`, the form of one replica's rows.
        replicas: the number of local replicas.
    """

    handle: tf.Tensor
    arrays: tuple[tf.Tensor, ...]
    form: str
    replicas: int

    def take(self) -> WorkerBatch:
        """Returns the next batch, and waits until its indices are there.

        Raises:
            tf.errors.OutOfRangeError: the queue was closed.
        """
        nest = _FORMS[self.form]
        specs = leaves_of(nest)
        # The arrays are in the host's memory. So only the rows of the batch go to a GPU.
        with tf.device("CPU:0"):
            indices, counts = tf.raw_ops.QueueDequeueV2(
                handle=self.handle, component_types=[tf.int64, tf.int64]
            )
            counts = tf.unstack(tf.ensure_shape(counts, [3 * self.replicas + 1]))
            data = []
            for i in range(self.replicas):
                rows = tf.ensure_shape(indices[i, : counts[i]], specs[0].shape[:1])
                leaves = [
                    tf.cast(tf.gather(array, rows), spec.dtype)
                    for array, spec in zip(self.arrays, specs, strict=True)
                ]
                data.append(tf.nest.pack_sequence_as(nest, leaves))
        own_rows = tuple(counts[self.replicas : 2 * self.replicas])
        first_rows = tuple(counts[2 * self.replicas : -1])
        lost = tf.constant(0, tf.int64)
        return WorkerBatch(tuple(data), own_rows, first_rows, counts[-1], tf.constant(-1), lost)


class Ahead:
    """A queue whose next batch is copied to the replicas' GPUs while a step runs.

    Attributes:
        queue: the queue.
        gpus: the devices of the local replicas.
        held: the batch that was taken from the queue and copied, or None before the first step.
    """

    def __init__(self, queue: BatchQueue | IndexQueue, gpus: Sequence[str]) -> None:
        self.queue, self.gpus = queue, gpus
        self.held: WorkerBatch | None = None


def on_devices(batch: WorkerBatch, devices: Sequence[str]) -> WorkerBatch:
    """Returns the same batch with each replica's rows on its device."""

    def copied(tensor: tf.Tensor, device: str) -> tf.Tensor:
        # A GPU cannot hold text.
        if tensor.dtype == tf.string:
            return tensor
        with tf.device(device):
            return tf.identity(tensor)

    data = tuple(
        tf.nest.map_structure(lambda t, device=device: copied(t, device), rows)
        for rows, device in zip(batch.data, devices, strict=True)
    )
    return batch._replace(data=data)


def with_any_rows(batch: WorkerBatch) -> WorkerBatch:
    """Returns a batch with specs in place of its data, so that it stands for any number of rows."""
    return batch._replace(data=specs_of_any_rows(batch.data))


def specs_of_any_rows(data: Any) -> Any:
    """Returns a `tf.TensorSpec` for each of the tensors, for any number of rows."""
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)


# The nests of `tf.TensorSpec` by the names that queues hold.
_FORMS: dict[str, Any] = {}


def queue_of(queue: tf.queue.QueueBase, form: Any, replicas: int) -> BatchQueue:
    """Returns the `BatchQueue` of a queue."""
    return BatchQueue(handle=queue.queue_ref, form=_named(form), replicas=replicas)


def index_queue_of(queue: tf.queue.QueueBase, arrays: Any, form: Any, replicas: int) -> IndexQueue:
    """Returns the `IndexQueue` of a queue."""
    return IndexQueue(
        handle=queue.queue_ref,
        arrays=tuple(leaves_of(arrays)),
        form=_named(form),
        replicas=replicas,
    )


def _named(form: Any) -> str:
    """Stores a form in `_FORMS`, and returns its name."""
    name = repr(form)
    _FORMS[name] = form
    return name


def _fixed_rows(data: Any) -> int | None:
    """Returns the number of rows of the data, or None if it is unknown while a step is traced."""
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(data)}
    return sizes.pop() if len(sizes) == 1 else None
