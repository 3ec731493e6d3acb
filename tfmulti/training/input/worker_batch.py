"""A worker's part of a global batch, as the compiled step gets it, and where it takes it from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmulti.data.source import leaves_of
from tfmulti.distribution.replica_slice import ReplicaSlice, part_of

PREFETCH_STEPS = 2  # batches that wait for the step; the reader makes others meanwhile


class WorkerBatch(NamedTuple):
    """This worker's part of one global batch.

    `data[i]` are the rows that local replica `i` reads, from row `first_rows[i]` of the
    global batch on, and `own_rows[i]` how many of them count: all, or none where a replica
    without rows reads one (`sharding.rows_to_read`). `rows` is the number of rows of the
    global batch (all int64), and `digest` a small whole number that is the same on all
    workers if they read the same global batch (-1: not computed). `lost` counts the rows that
    this worker could not read: they are left out of `data` and `own_rows`, and on one worker
    out of `first_rows` and `rows`; several have to tell each other (`steps.agreed`).
    """

    data: tuple[Any, ...]
    own_rows: tuple[tf.Tensor, ...]
    first_rows: tuple[tf.Tensor, ...]
    rows: tf.Tensor
    digest: tf.Tensor
    lost: tf.Tensor

    def weight(self, local: int) -> tf.Tensor:
        """Returns the part of the global batch that a local replica has, float64."""
        return part_of(self.own_rows[local], self.rows)  # of nothing, where all rows were lost

    def of_any_rows(self) -> WorkerBatch:
        """Returns the same data, whose number of rows is not known when a step is traced.

        A step must ask a tensor for it: a number would be that of this share (`row_labels`).
        """
        return self._replace(data=of_any_rows(self.data))

    def share(
        self, local: int, *, alone: bool, sync_batch_norm: bool, is_local: bool = False
    ) -> ReplicaSlice:
        """Returns a local replica's share; `alone` if there is no other replica."""
        own = self.own_rows[local]
        return ReplicaSlice(
            part_of(own, own) if is_local else self.weight(local),
            self.own_rows[local],
            self.first_rows[local],
            self.rows,
            _fixed_rows(self.data[local]),
            alone,
            sync_batch_norm,
            is_local=is_local,
        )


def of_any_rows(data: Any) -> Any:
    """Returns the same tensors, whose number of rows is not known when a step is traced."""

    def loosened(leaf: Any) -> Any:
        known = isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is not None
        if not known:
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])

    return tf.nest.map_structure(loosened, data)


class BatchQueue(tf.experimental.ExtensionType):  # type: ignore[misc]
    """The end of a queue of `WorkerBatch` that a compiled step takes from.

    An argument of the step: another queue of the same form is no reason to trace it anew. Taken
    from the queue itself a batch costs a fifth of what an iterator of tf.data adds.

    `handle` is the queue's. It holds, for each of `replicas` local replicas, the leaves of its
    rows, and then `WorkerBatch`' counts in one vector (`counts`).
    """

    handle: tf.Tensor
    form: str  # names a nest of tf.TensorSpec
    replicas: int

    def take(self) -> WorkerBatch:
        """Returns the next batch; waits until there is one.

        Raises:
            OutOfRangeError: the queue was closed, since the data cannot be read on.
        """
        nest = _FORMS[self.form]
        specs = leaves_of(nest)
        types = [spec.dtype for spec in specs] * self.replicas + [tf.int64]
        *parts, counts = tf.raw_ops.QueueDequeueV2(handle=self.handle, component_types=types)
        data = []
        for i in range(self.replicas):
            own = parts[i * len(specs) : (i + 1) * len(specs)]
            own = [tf.ensure_shape(t, s.shape) for t, s in zip(own, specs, strict=True)]
            data.append(tf.nest.pack_sequence_as(nest, own))
        counts = tf.ensure_shape(counts, [2 * self.replicas + 2])
        *numbers, rows, lost = tf.unstack(counts)
        own_rows, first_rows = numbers[: self.replicas], numbers[self.replicas :]
        return WorkerBatch(
            tuple(data), tuple(own_rows), tuple(first_rows), rows, tf.constant(-1), lost
        )


class IndexQueue(tf.experimental.ExtensionType):  # type: ignore[misc]
    """The end of a queue of examples' numbers, of which a compiled step gathers the rows.

    `arrays` are the leaves of all examples, in the host's memory. The queue holds, for each of
    `replicas` local replicas, numbers (filled up to one length), and a vector of counts.
    """

    handle: tf.Tensor
    arrays: tuple[tf.Tensor, ...]
    form: str  # names a nest of tf.TensorSpec
    replicas: int

    def take(self) -> WorkerBatch:
        """Returns the next batch; waits until its numbers are there."""
        nest = _FORMS[self.form]
        specs = leaves_of(nest)
        with tf.device("CPU:0"):  # where the arrays are: the rows alone go to a GPU
            numbers, counts = tf.raw_ops.QueueDequeueV2(
                handle=self.handle, component_types=[tf.int64, tf.int64]
            )
            counts = tf.unstack(tf.ensure_shape(counts, [3 * self.replicas + 1]))
            data = []
            for i in range(self.replicas):
                rows = tf.ensure_shape(numbers[i, : counts[i]], specs[0].shape[:1])
                own = [
                    tf.cast(tf.gather(array, rows), spec.dtype)
                    for array, spec in zip(self.arrays, specs, strict=True)
                ]
                data.append(tf.nest.pack_sequence_as(nest, own))
        own_rows = tuple(counts[self.replicas : 2 * self.replicas])
        first_rows = tuple(counts[2 * self.replicas : -1])
        nothing = tf.constant(0, tf.int64)
        return WorkerBatch(tuple(data), own_rows, first_rows, counts[-1], tf.constant(-1), nothing)


class Ahead:
    """An outlet whose next batch is taken, and brought to the replicas' GPUs, while a step runs.

    `held` is the batch that was taken so; None at the beginning.
    """

    def __init__(self, outlet: BatchQueue | IndexQueue, gpus: Sequence[str]) -> None:
        self.outlet, self.gpus = outlet, gpus
        self.held: WorkerBatch | None = None


class Replay:
    """An iterator, and another one whose batches are to be taken before it.

    As many batches stand before it as the first executions have: none takes from both.
    """

    def __init__(self, first: Any, batches: int, rest: Any) -> None:
        self._first, self._left, self._rest = first, batches, rest

    def source(self, steps: int) -> Any:
        """Returns the iterator that an execution of so many steps takes from."""
        if self._left <= 0:
            return self._rest
        self._left -= steps
        return self._first


def on_devices(shards: WorkerBatch, devices: Sequence[str]) -> WorkerBatch:
    """Returns the same with each replica's rows on its device; text stays with the host."""

    def copied(tensor: tf.Tensor, device: str) -> tf.Tensor:
        if tensor.dtype == tf.string:
            return tensor  # a GPU holds none
        with tf.device(device):
            return tf.identity(tensor)

    data = tuple(
        tf.nest.map_structure(lambda t, device=device: copied(t, device), own)
        for own, device in zip(shards.data, devices, strict=True)
    )
    return shards._replace(data=data)


def with_any_rows(shards: WorkerBatch) -> WorkerBatch:
    """Returns the form of all batches, out of one: any number of rows."""
    return shards._replace(
        data=tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), shards.data
        )
    )


_FORMS: dict[str, Any] = {}


def queue_of(queue: tf.queue.QueueBase, form: Any, replicas: int) -> BatchQueue:
    """Returns the outlet of a queue whose examples have this form, a nest of tf.TensorSpec."""
    return BatchQueue(handle=queue.queue_ref, form=_named(form), replicas=replicas)


def index_queue_of(queue: tf.queue.QueueBase, arrays: Any, form: Any, replicas: int) -> IndexQueue:
    """Returns the outlet of a queue of numbers; `arrays` is a nest as `form`, of all examples."""
    return IndexQueue(
        handle=queue.queue_ref,
        arrays=tuple(leaves_of(arrays)),
        form=_named(form),
        replicas=replicas,
    )


def _named(form: Any) -> str:
    name = repr(form)
    _FORMS[name] = form
    return name


def _fixed_rows(data: Any) -> int | None:
    """Returns how many rows the data has, where that is known when a step is traced."""
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(data)}
    return sizes.pop() if len(sizes) == 1 else None
