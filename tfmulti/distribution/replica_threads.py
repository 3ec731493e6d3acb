"""Sums and gathers values between the replicas of one process, on CPUs.

For each tensor, TensorFlow's collectives take about thirty operations, threads of their own and
copies. But the replicas of one process are parts of one graph, so each can read the tensors of the
others. So a sum here is one operation, which is made once for all replicas.

The functions return None on GPUs, where NCCL is faster, and for several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Parts = tuple[tf.Tensor, ...]


def totals(values: Sequence[Any]) -> list[Any] | None:
    """Returns each value summed over all replicas; None where TensorFlow's collectives must serve.

    float16 and bfloat16 are added in float32 and rounded once. The IndexedSlices of the replicas
    are concatenated.

    Args:
        values: tensors or `tf.IndexedSlices`, one of each on every replica.
    """
    flat = [part for value in values for part in _parts_of(value)]
    ways = [way for value in values for way in _ways_of(value)]
    found = _from_parts(flat, ways)
    if found is None:
        return None
    left = iter(found)
    return [
        tf.IndexedSlices(next(left), next(left), value.dense_shape)
        if isinstance(value, tf.IndexedSlices)
        else next(left)
        for value in values
    ]


def each(value: tf.Tensor) -> tf.Tensor | None:
    """Returns every replica's value, `[replicas, ...]` in their order; None as in `totals`."""
    found = _from_parts([value], [tf.stack])
    return None if found is None else found[0]


def rows(value: tf.Tensor) -> tf.Tensor | None:
    """Returns the rows of all replicas in the order of the replicas; None as in `totals`."""
    found = _from_parts([value], [_joined])
    return None if found is None else found[0]


def _from_parts(
    values: Sequence[tf.Tensor], ways: Sequence[Callable[[Parts], tf.Tensor]]
) -> list[tf.Tensor] | None:
    """Returns what each way makes of all replicas' parts of a value, the same on all replicas.

    Args:
        values: this replica's parts.
        ways: for each value, the function that gets the parts of all replicas.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if not _are_siblings(context.strategy, replicas):
        return None

    def merge(_: tf.distribute.Strategy, *parts: Any) -> list[tf.Tensor]:
        # TensorFlow gives a tensor that is the same on all replicas as that one tensor.
        return [
            way(
                part.values
                if isinstance(part, tf.distribute.DistributedValues)
                else (part,) * replicas
            )
            for way, part in zip(ways, parts, strict=True)
        ]

    found: list[tf.Tensor] = context.merge_call(merge, args=tuple(values))
    return found


def _are_siblings(strategy: tf.distribute.Strategy, replicas: int) -> bool:
    """Returns whether there is one replica, or all replicas are CPU devices of this process."""
    if replicas == 1:
        return True
    devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    return len(devices) == replicas and all(device.device_type == "CPU" for device in devices)


def _parts_of(value: Any) -> list[tf.Tensor]:
    """Returns the tensors that a value consists of."""
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _ways_of(value: Any) -> list[Callable[[Parts], tf.Tensor]]:
    """Returns how the replicas' parts of each of `_parts_of` are put together."""
    return [_joined, _joined] if isinstance(value, tf.IndexedSlices) else [_sum]


def _joined(parts: Parts) -> tf.Tensor:
    return tf.concat(parts, 0)


def _sum(parts: Parts) -> tf.Tensor:
    if parts[0].dtype not in (tf.float16, tf.bfloat16):
        return tf.add_n(parts)
    return tf.cast(tf.add_n([tf.cast(part, tf.float32) for part in parts]), parts[0].dtype)
