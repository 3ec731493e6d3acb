"""Weights, reduces and gathers values between the replicas of one step.

Each replica computes the loss of its own rows as one device would. The gradient of the global batch
is a weighted sum over the replicas. With the gradient `g_r` of replica `r`, which has `n_r` of the
`G` rows of the global batch, it is

    g = sum over r of (n_r / G) * g_r

This is exact for replicas with different numbers of rows, and for replicas without rows.

These functions exchange values between the replicas:

| function | its result on each replica |
|---|---|
| `reduce_gradients` | the gradients of the global batch, which are summed in buckets |
| `global_gradient` | the gradient with respect to one value that is the same on all replicas |
| `sum_with_gradient` | the sum of a tensor over all replicas; gradients flow back |
| `sum_by_dtype` | such sums of several tensors, by one collective for each dtype |
| `gather_rows` | the rows of all replicas |
| `gather_batch` | the same for the rows of a batch, which may be ragged or sparse |
| `gather_rows_with_gradient` | the same rows; a row's gradient flows back to its replica |
| `stack_over_replicas` | every replica's value, `[replicas, ...]`; gradients flow back |
| `global_metrics` | the metrics over the data of all replicas |

Every replica of every worker must call each of them, in replica context and in the same order.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfmulti.distribution import collectives, replica_threads, row_labels
from tfmulti.distribution.custom_gradients import custom_gradient
from tfmulti.distribution.lookup_gradients import (
    joined_lookups,
    lookups_in,
    summed_over_replicas,
)
from tfmulti.distribution.replica_slice import ReplicaSlice, current, refuse_to_compile
from tfmulti.errors import ModelError

SUM = tf.distribute.ReduceOp.SUM
Results = TypeVar("Results")


def reduce_gradients(
    gradients: Sequence[Any],
    send_dtype: tf.DType | None = None,
    by_bytes: int = 0,
    names: Sequence[str] = (),
) -> list[Any]:
    """Returns the gradients of the global batch, the same on every replica.

    Without a current `ReplicaSlice` the gradients are summed without weights. In that case they
    were weighted before, or come from a training loop of the user's own, which scales its losses as
    tf.distribute's guide says.

    Args:
        gradients: tensors, `tf.IndexedSlices`, or None, which stays None.
        send_dtype: the type in which dense float32 gradients are sent; None means their own type.
            Gradients of 16 bits are added in float32, except by TensorFlow's own collectives.
        by_bytes: the size of a bucket. Gradients are summed in buckets of about this size while
            other gradients are computed, those of the last layers first. 0 means a single bucket.
        names: the names of the variables, for `Watchdog`; empty if they are not known.

    Raises:
        ModelError: the `train_step` applies gradients inside a condition, a loop or a `tf.function`
            of its own, where replicas cannot exchange values.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    replica_slice = current()
    is_local = [g is not None and not is_global(g) for g in gradients]
    present = list(itertools.compress(gradients, is_local))
    named = list(itertools.compress(names, is_local)) if names else None
    if replica_slice is not None:
        present = [weighted(g, replica_slice.weight) for g in present]
    try:
        reduced = iter(_sum_by_lookups(present, send_dtype, by_bytes, named))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ModelError(
            "the train_step applies gradients inside a condition, a loop or a tf.function of its "
            "own, where replicas cannot exchange values. Compute them there, and apply them "
            "outside."
        ) from None
    of_all = [next(reduced) if local else g for g, local in zip(gradients, is_local, strict=True)]
    for gradient in of_all:
        row_labels.mark(gradient, row_labels.ALIKE)
    return of_all


# The gradients of lookups that are those of the global batch already.
_global_lookups: weakref.WeakSet[tf.IndexedSlices] = weakref.WeakSet()


def mark_global(gradient: Any) -> Any:
    """Makes `reduce_gradients` leave a gradient as it is, if it is an IndexedSlices; returns it.

    A dense gradient that is the same on all replicas is its own mean. The lookups of an
    IndexedSlices would be repeated.
    """
    if isinstance(gradient, tf.IndexedSlices):
        _global_lookups.add(gradient)
    return gradient


def is_global(gradient: Any) -> bool:
    """Returns whether `mark_global` got a gradient of lookups."""
    return isinstance(gradient, tf.IndexedSlices) and gradient in _global_lookups


# The gradients of lookups as a tape has given them.
_lookups_of_tape: weakref.WeakSet[tf.IndexedSlices] = weakref.WeakSet()


def mark_of_tape(gradient: tf.IndexedSlices) -> None:
    """Makes `is_known_gradient` true for a gradient of lookups that a tape has given."""
    _lookups_of_tape.add(gradient)


def is_known_gradient(gradient: Any) -> bool:
    """Returns whether a gradient of lookups is that of a tape, or that of the global batch."""
    is_of_lookups = isinstance(gradient, tf.IndexedSlices)
    return is_of_lookups and (gradient in _lookups_of_tape or gradient in _global_lookups)


def _sum_by_lookups(
    gradients: Sequence[Any],
    send_dtype: tf.DType | None,
    by_bytes: int,
    names: Sequence[str] | None,
) -> list[Any]:
    """Returns what `_sum_in_buckets` does, and sums each lookup of an IndexedSlices by itself.

    If all replicas look up the same rows, only the values are summed.
    """
    # The values to sum: each dense gradient, and each lookup of an IndexedSlices.
    values: list[Any] = []
    labels: list[str] = []
    for gradient, name in zip(gradients, names or [""] * len(gradients), strict=True):
        parts = [gradient]
        if isinstance(gradient, tf.IndexedSlices):
            parts = [
                lookup.values
                if lookup.is_alike
                else tf.IndexedSlices(lookup.values, lookup.indices, gradient.dense_shape)
                for lookup in lookups_in(gradient)
            ]
        values += parts
        labels += [name] * len(parts)
    totals = iter(_sum_in_buckets(values, send_dtype, by_bytes, labels))

    def of_lookups(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the gradient that joins the summed lookups of an IndexedSlices."""
        summed_lookups = [
            summed_over_replicas(lookup, total)
            for lookup, total in zip(lookups_in(gradient), totals, strict=False)
        ]
        return joined_lookups(summed_lookups, gradient)

    return [
        of_lookups(gradient) if isinstance(gradient, tf.IndexedSlices) else next(totals)
        for gradient in gradients
    ]


def _sum_in_buckets(
    values: Sequence[Any],
    send_dtype: tf.DType | None = None,
    by_bytes: int = 0,
    names: Sequence[str] = (),
) -> list[Any]:
    """Returns each value summed over all replicas, in its own type.

    Args:
        values: tensors or `tf.IndexedSlices`.
        send_dtype: the type in which dense float32 values are sent; see `reduce_gradients`.
        by_bytes: the size of a bucket; see `reduce_gradients`.
        names: a description of each value; empty if there are none.
    """
    as_sent = [_as_sent(value, send_dtype) for value in values]
    sums = _sum_by_collectives(values, as_sent, by_bytes, names or [""] * len(values))
    missing = [i for i in range(len(values)) if i not in sums]
    if missing:
        sums |= zip(
            missing, _sum_without_collectives([as_sent[i] for i in missing], by_bytes), strict=True
        )
    pairs = ((sums[i], value.dtype) for i, value in enumerate(values))
    return [total if total.dtype == dtype else tf.cast(total, dtype) for total, dtype in pairs]


def _sum_without_collectives(values: Sequence[Any], by_bytes: int = 0) -> list[Any]:
    """Returns the sums that `collectives` does not make.

    `replica_threads` makes them, or TensorFlow where that returns None.
    """
    sums = replica_threads.totals(values)
    if sums is None:
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=by_bytes)
        sums = tf.distribute.get_replica_context().all_reduce(SUM, list(values), options)
    return sums


def _sum_by_collectives(
    values: Sequence[Any], as_sent: Sequence[Any], by_bytes: int, names: Sequence[str]
) -> dict[int, tf.Tensor | tf.IndexedSlices]:
    """Returns the sums that `collectives` makes, by the index of the value.

    The result is empty where `collectives` cannot be used. It lacks dense values whose shape is not
    known.

    Args:
        values: tensors or `tf.IndexedSlices`.
        as_sent: the same values in the types in which they are sent.
        by_bytes: the size of a bucket; see `reduce_gradients`.
        names: a description of each value.
    """
    if not collectives.are_in_use():
        return {}
    buckets = _buckets(as_sent, by_bytes)
    flat = [[tf.reshape(as_sent[i], [-1]) for i in bucket] for bucket in buckets]
    slices = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
    totals = collectives.begin_totals(
        [tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0) for tensors in flat],
        [", ".join(filter(None, (names[i] for i in bucket))) for bucket in buckets],
    )
    # All rows are sent before `totals()`, which waits for the other workers.
    rows = collectives.begin_rows(
        [v for i in slices for v in (values[i].values, values[i].indices)]
    )
    sums: dict[int, Any] = {}
    for bucket, total in zip(buckets, totals() if totals else (), strict=False):
        sizes = [as_sent[i].shape.num_elements() for i in bucket]
        parts = [total] if len(bucket) == 1 else tf.split(total, sizes)
        for i, part in zip(bucket, parts, strict=True):
            sums[i] = tf.reshape(part, values[i].shape)
    remaining = iter(rows() if rows else ())
    for i, values_of_all, indices in zip(slices, remaining, remaining, strict=False):
        sums[i] = tf.IndexedSlices(values_of_all, indices, values[i].dense_shape)
    return sums


def _buckets(gradients: Sequence[Any], by_bytes: int) -> list[list[int]]:
    """Returns the indices of dense gradients in buckets, the last layers' first.

    All gradients of a bucket have one type. A gradient that is as large as a bucket is sent alone,
    so it need not be copied together with others.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(gradients))):
        gradient = gradients[i]
        if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
            continue
        size = gradient.dtype.size * gradient.shape.num_elements()
        if 0 < by_bytes <= size:
            buckets.append([i])
            continue
        bucket, bytes_before = open_buckets.get(gradient.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        full = 0 < by_bytes <= bytes_before + size
        open_buckets[gradient.dtype] = ([], 0) if full else (bucket, bytes_before + size)
    return buckets


def _as_sent(gradient: Any, send_dtype: tf.DType | None) -> Any:
    """Returns a gradient in the type in which it is sent."""
    # An IndexedSlices keeps its type: it has few rows, and no collective gathers bfloat16.
    dense = not isinstance(gradient, tf.IndexedSlices)
    return (
        tf.cast(gradient, send_dtype)
        if send_dtype and dense and gradient.dtype == tf.float32
        else gradient
    )


def weighted(gradient: Any, weight: tf.Tensor) -> Any:
    """Returns a gradient times a slice's weight. With a weight of 0 it is 0, even for NaN."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, tf.cast(weight, gradient.values.dtype))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def local_index(local_replicas: int) -> int:
    """Returns this replica's index among the replicas of its worker."""
    context = tf.distribute.get_replica_context()
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    assert replica is not None, "the replica's number must be known when a step is traced"
    return int(replica) % local_replicas


def metric_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables of all metrics of a model."""
    return [v for metric in model.metrics for v in metric.variables]


def rows_of(batch: Any, start: Any, stop: Any) -> Any:
    """Returns the rows [start, stop) of each tensor of a batch.

    Args:
        batch: a nest of dense, ragged or sparse tensors.
        start: the first row.
        stop: the row after the last one.
    """

    def rows(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            begin, end = (tf.cast(row, tf.int64) for row in (start, stop))
            rest = value.dense_shape[1:]
            first = tf.concat([[begin], tf.zeros_like(rest)], 0)
            return tf.sparse.slice(value, first, tf.concat([[end - begin], rest], 0))
        return value[start:stop]

    return tf.nest.map_structure(rows, batch, expand_composites=False)


# TensorFlow's collectives gather these types in a larger one.
_GATHERED_AS = {
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
}


def gather_rows(value: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `value` of all replicas, in the order of the replicas.

    The replicas may have different numbers of rows. TensorFlow's `all_gather` promises no order
    over several workers with several replicas each. So this function also gathers the replicas'
    numbers, and sorts the rows by them.

    Raises:
        ModelError: the value has strings, and the replicas are not CPU devices of one process.
        CannotCompileError: XLA is to compile the step.
    """
    refuse_to_compile("takes the rows of all replicas")
    if value.dtype == tf.bool:
        return tf.cast(gather_rows(tf.cast(value, tf.int32)), tf.bool)
    of_process = replica_threads.gather_rows(value)
    if of_process is not None:
        return of_process
    if value.dtype == tf.string:
        raise ModelError(
            "strings cannot be gathered from several workers or GPUs. Use numbers in their place, "
            "or plain Keras on one device."
        )
    receive = collectives.begin_rows([value])
    if receive is not None:
        return receive()[0]
    if value.dtype in _GATHERED_AS:
        return tf.cast(gather_rows(tf.cast(value, _GATHERED_AS[value.dtype])), value.dtype)
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.int32)
    numbers = context.all_gather(tf.fill([tf.shape(value)[0]], number), axis=0)
    return tf.gather(context.all_gather(value, axis=0), tf.argsort(numbers, stable=True))


def gather_batch(data: Any, replica_slice: ReplicaSlice) -> Any:
    """Returns the rows of all replicas for a nest of dense, ragged and sparse tensors.

    Args:
        data: the rows of this replica that count.
        replica_slice: this replica's slice.

    Raises:
        ModelError: a tensor has strings, and there are several workers or GPUs.
    """

    def gathered(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            lengths = [gather_rows(lengths) for lengths in value.nested_row_lengths()]
            values = gather_rows(value.flat_values)
            return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)
        if isinstance(value, tf.SparseTensor):
            rest = value.dense_shape[1:]
            first = tf.concat([[replica_slice.first_row], tf.zeros_like(rest)], 0)
            shape = tf.concat([[replica_slice.global_rows], rest], 0)
            indices = gather_rows(value.indices + first)
            return tf.SparseTensor(indices, gather_rows(value.values), shape)
        return gather_rows(value) if isinstance(value, tf.Tensor) and value.shape.rank else value

    return tf.nest.map_structure(gathered, data)


def sum_with_gradient(value: tf.Tensor) -> tf.Tensor:
    """Returns a value summed over all replicas.

    Args:
        value: a tensor whose shape is known when the step is traced.

    Raises:
        CannotCompileError: XLA is to compile the step.
    """
    return _with_gradient(value, _sum_without_gradient(value), sum_with_gradient)


def _sum_without_gradient(value: tf.Tensor) -> tf.Tensor:
    """Returns what `sum_with_gradient` returns, without a gradient."""
    refuse_to_compile("takes a sum over all replicas")
    receive = collectives.begin_totals([value])
    return _sum_without_collectives([value])[0] if receive is None else receive()[0]


def global_gradient(replica_slice: ReplicaSlice, upstream: tf.Tensor) -> tf.Tensor:
    """Returns the gradient with respect to a value that is the same on all replicas.

    The gradient of the global batch is the mean over the replicas, weighted by their rows
    (`reduce_gradients`). So each replica's part is multiplied by its weight. The same holds for the
    gradient of this result with respect to `upstream`.

    Args:
        replica_slice: this replica's slice.
        upstream: this replica's part of the gradient.
    """
    # The gradient of a lookup of rows (`tf.gather`) is a tf.IndexedSlices.
    upstream = tf.convert_to_tensor(upstream)
    own = tf.math.multiply_no_nan(upstream, tf.cast(replica_slice.weight, upstream.dtype))
    return _with_gradient(
        upstream, _sum_without_gradient(own), functools.partial(global_gradient, replica_slice)
    )


def gather_rows_with_gradient(
    replica_slice: ReplicaSlice,
    rows: tf.Tensor,
    entries: Any = 1,
    to_global: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Returns the rows of all replicas; the gradient of a row goes back to the replica that has it.

    Args:
        replica_slice: this replica's slice.
        rows: the rows that this replica reads.
        entries: how many entries of axis 0 a row has.
        to_global: takes this replica's part of the gradient with respect to the rows of all
            replicas, and returns the whole gradient. None means `global_gradient`.
    """
    to_global = to_global or functools.partial(global_gradient, replica_slice)

    @custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        read_rows = tf.shape(rows, tf.int64)[0]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # `reduce_gradients` will multiply by this replica's weight, so it is divided out here.
            first = entries * replica_slice.first_row
            own = to_global(upstream)[first : first + read_rows]
            return tf.math.divide_no_nan(own, tf.cast(replica_slice.weight, own.dtype))

        return gather_rows(rows[: entries * replica_slice.own_rows]), gradient

    return tf.ensure_shape(gather(rows), [None, *rows.shape[1:]])


def stack_over_replicas(replica_slice: ReplicaSlice, value: tf.Tensor) -> tf.Tensor:
    """Returns every replica's value, `[replicas, ...]` in the order of the replicas.

    Args:
        replica_slice: this replica's slice.
        value: a tensor whose shape is known when the step is traced.

    Raises:
        CannotCompileError: XLA is to compile the step.
    """
    refuse_to_compile("takes the statistics of all replicas")
    context = tf.distribute.get_replica_context()
    number, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    gathered = collectives.gather(value)
    if gathered is None:
        gathered = replica_threads.gather(value)
    if gathered is None:
        one_hot = tf.one_hot(number, replicas, dtype=value.dtype)
        gathered = context.all_reduce(SUM, tf.tensordot(one_hot, value, axes=0))

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        # `reduce_gradients` will multiply by this replica's weight, so it is divided out here.
        own = global_gradient(replica_slice, upstream)[number]
        return tf.math.divide_no_nan(own, tf.cast(replica_slice.weight, own.dtype))

    return _with_gradient(value, gathered, gradient)


def _with_gradient(
    value: tf.Tensor, result: tf.Tensor, gradient: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns `result`, made from all replicas' values, with a gradient for this one's `value`.

    `result` is an argument of the inner function, too. If a function with a custom gradient uses a
    tensor that is not an argument, TensorFlow searches all operations behind it for variables. Here
    it would search the whole networks of the other replicas.
    """

    @custom_gradient
    def identity(value: tf.Tensor, result: tf.Tensor) -> Any:
        return tf.identity(result), lambda upstream: (gradient(upstream), None)

    marked: tf.Tensor = identity(value, result)
    row_labels.mark(marked, row_labels.ALIKE)
    return marked


def sum_by_dtype(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns each value summed over all replicas, with one collective for each dtype.

    Args:
        values: tensors whose shapes are known when the step is traced.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(values)
    totals: dict[int, tf.Tensor] = {}
    for dtype in sorted({v.dtype for v in values}, key=lambda d: d.name):
        indices = [i for i, v in enumerate(values) if v.dtype == dtype]
        packed = tf.concat([tf.reshape(values[i], [-1]) for i in indices], axis=0)
        parts = tf.split(
            sum_with_gradient(packed), [values[i].shape.num_elements() for i in indices]
        )
        for i, part in zip(indices, parts, strict=True):
            totals[i] = tf.reshape(part, values[i].shape)
    return [totals[i] for i in range(len(values))]


def global_metrics(
    variables: Sequence[Any],
    values: Sequence[tf.Tensor],
    results: Callable[[list[tf.Tensor]], Results],
    extra: Sequence[tf.Tensor],
) -> tuple[Results, list[tf.Tensor]]:
    """Returns the metrics over the data of all replicas so far, and `extra` summed over replicas.

    Each replica holds its own part of a metric's state. The states are added up, or averaged where
    the variable's aggregation says so, and the results are computed from these totals. The
    variables keep their values.

    Args:
        variables: the metrics' Keras variables.
        values: the values of these variables on this replica.
        results: computes the results from those variables, and from the summed `extra`.
        extra: further scalars to add up in the same collective.

    Raises:
        ModelError: the `result` of a metric changes a variable.
    """
    states, sums = _states_and_sums(variables, values, extra)

    def computed() -> Results:
        with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))) as scope:
            given = [scope.get_current_value(v) for v in variables]
            found = results(sums)
        for variable, state in zip(variables, given, strict=True):
            if scope.get_current_value(variable) is not state:
                raise ModelError(
                    f"result() of a metric changes its variable {variable.path!r}. Results are "
                    "computed from the states of all replicas, and not after each step, so change "
                    "variables in update_state."
                )
        return found

    return replica_threads.computed_once(computed), sums


def states_of_metrics(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the states of metrics over the data of all replicas so far.

    Args:
        variables: the metrics' Keras variables, which have this replica's part of the states.
    """
    return _states_and_sums(variables, [tf.identity(v.value) for v in variables], [])[0]


def _states_and_sums(
    variables: Sequence[Any], values: Sequence[tf.Tensor], extra: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the metrics' states of all replicas, and `extra` summed over the replicas."""
    context = tf.distribute.get_replica_context()
    first = context.replica_id_in_sync_group == 0
    local = [
        value if v.aggregation != "only_first_replica" else tf.where(first, value, 0)
        for v, value in zip(variables, values, strict=True)
    ]
    to_sum = [*local, *extra]
    totals = replica_threads.totals(to_sum)
    if totals is None:
        totals = sum_by_dtype(to_sum)
    replicas = context.num_replicas_in_sync
    states = [
        total if v.aggregation != "mean" else total / tf.cast(replicas, total.dtype)
        for v, total in zip(variables, totals, strict=False)
    ]
    return states, totals[len(local) :]
