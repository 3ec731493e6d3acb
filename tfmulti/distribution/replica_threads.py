"""Sums and gathers between the replicas of one process, on CPUs.

TensorFlow's collectives take some thirty operations for each tensor there, threads of their own and
copies. Replicas of one process are parts of one graph, so what one has computed the others can
read: a sum is one operation, made once for all of them.

On GPUs, where NCCL does better, and between workers callers do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Parts = tuple[tf.Tensor, ...]


def totals(values: Sequence[Any]) -> list[Any] | None:
    """Returns each value summed over all replicas; None where TensorFlow's collectives must serve.

    float16 and bfloat16 are added in float32, and rounded once. Of IndexedSlices all rows are kept.

    Args:
        values: tensors or `tf.IndexedSlices`, one on each replica.
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
    """Returns every replica's value, `[replicas, ...]` in their order; None as `totals`."""
    found = _from_parts([value], [tf.stack])
    return None if found is None else found[0]


def rows(value: tf.Tensor) -> tf.Tensor | None:
    """Returns the rows of all replicas, the first replica's first; None as `totals`."""
    found = _from_parts([value], [_joined])
    return None if found is None else found[0]


def _from_parts(
    values: Sequence[tf.Tensor], ways: Sequence[Callable[[Parts], tf.Tensor]]
) -> list[tf.Tensor] | None:
    """Returns what each way makes of all replicas' parts of a value, the same for all replicas."""
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if not _are_siblings(context.strategy, replicas):
        return None

    def merge(_: tf.distribute.Strategy, *parts: Any) -> list[tf.Tensor]:
        # What is one tensor on all replicas comes as that.
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
    if replicas == 1:
        return True
    devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    return len(devices) == replicas and all(device.device_type == "CPU" for device in devices)


def _parts_of(value: Any) -> list[tf.Tensor]:
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _ways_of(value: Any) -> list[Callable[[Parts], tf.Tensor]]:
    return [_joined, _joined] if isinstance(value, tf.IndexedSlices) else [_sum]


def _joined(parts: Parts) -> tf.Tensor:
    return tf.concat(parts, 0)


def _sum(parts: Parts) -> tf.Tensor:
    if parts[0].dtype not in (tf.float16, tf.bfloat16):
        return tf.add_n(parts)
    return tf.cast(tf.add_n([tf.cast(part, tf.float32) for part in parts]), parts[0].dtype)
