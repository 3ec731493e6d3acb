"""Sums and gathers values between the replicas of one process, on CPUs.

The replicas of one process are parts of one graph, so each can read the tensors of the others. So a
sum here is a single operation for all replicas. TensorFlow's collectives take about thirty
operations for each tensor, and also threads and copies. What follows from sums can also be computed
once for all replicas.

Sums and gathers are None on GPUs, where NCCL is faster, and for several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

Result = TypeVar("Result")


def totals(values: Sequence[Any]) -> list[Any] | None:
    """Returns each value summed over all replicas; None on GPUs and for several workers.

    float16 and bfloat16 are added in float32 and rounded once. The IndexedSlices of the replicas
    are concatenated.

    Args:
        values: tensors or `tf.IndexedSlices`, one of each on every replica.
    """
    return _merged(values, _sum)


def gather(value: tf.Tensor) -> tf.Tensor | None:
    """Returns `[replicas, ...]`, every replica's value in their order; None as in `totals`."""
    merged = _merged([value], tf.stack)
    return None if merged is None else merged[0]


def gather_rows(value: tf.Tensor) -> tf.Tensor | None:
    """Returns the rows of all replicas in the order of the replicas; None as in `totals`."""
    merged = _merged([value], lambda parts: tf.concat(parts, 0))
    return None if merged is None else merged[0]


def computed_once(compute: Callable[[], Result]) -> Result:
    """Returns what a function computes from values that are the same on all replicas.

    Replicas that are CPU devices of one process share one computation. Every replica calls it.
    """
    context = tf.distribute.get_replica_context()
    if not are_siblings(context.strategy):
        return compute()
    result: Result = context.merge_call(lambda _: compute())
    return result


def _merged(values: Sequence[Any], merge_parts: Callable[[Sequence[Any]], Any]) -> list[Any] | None:
    """Returns the merged parts of all replicas for each value, the same on all replicas.

    Args:
        values: this replica's parts.
        merge_parts: takes the parts of all replicas for one value.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if replicas == 1:
        return [merge_parts((value,)) for value in values]
    if not are_siblings(context.strategy):
        return None

    def merge(_: tf.distribute.Strategy, *parts_of_values: Any) -> list[Any]:
        # A tensor that is the same on all replicas comes as that tensor alone.
        return [
            merge_parts(
                parts.values
                if isinstance(parts, tf.distribute.DistributedValues)
                else (parts,) * replicas
            )
            for parts in parts_of_values
        ]

    merged: list[Any] = context.merge_call(merge, args=tuple(values))
    return merged


def are_siblings(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether there are several replicas, and all are CPU devices of this process."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return False
    devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    return len(devices) == replicas and all(device.device_type == "CPU" for device in devices)


def _sum(parts: Sequence[Any]) -> Any:
    """Returns the sum of tensors, or of `tf.IndexedSlices`."""
    first = parts[0]
    if isinstance(first, tf.IndexedSlices):
        values = tf.concat([part.values for part in parts], 0)
        indices = tf.concat([part.indices for part in parts], 0)
        return tf.IndexedSlices(values, indices, first.dense_shape)
    if first.dtype not in (tf.float16, tf.bfloat16):
        return tf.add_n(parts)
    return tf.cast(tf.add_n([tf.cast(part, tf.float32) for part in parts]), first.dtype)
