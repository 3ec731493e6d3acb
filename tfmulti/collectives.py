"""Sums and gathers between workers, by TensorFlow's collective kernels with keys of our own.

`ReplicaContext.all_reduce` gives each collective of each call a new key, of which a worker has
to ask the first one, and lets one collective wait for the one before. Here a collective keeps its
key as long as the program runs, so it is agreed on once, and those of a step run beside each
other: between two workers of one machine a sum of 100 numbers takes 0.2 ms instead of 0.42.
Kernels: https://www.tensorflow.org/api_docs/python/tf/raw_ops/CollectiveReduceV2

A key must not be in use twice at a time. So these serve only what is compiled once and called in
turn: a step's own graph (`serving`). In functions of the user's own, in eager mode, on GPUs and
within a process callers do without, and use the replica context.
"""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Iterator

import tensorflow as tf

from tfmulti.strategies import Placement

GATHER_BYTES = 32_768  # what is shorter is gathered and then summed: one way instead of two
GATHERS = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)  # the kernel knows no others
GROUP_KEY = 0x7466_6D75  # of the group of all workers; TensorFlow counts its own from 1


class _Serving:
    """The graph in which collectives get keys, by how many there were before in it."""

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.made = name, 0
        self.workers, self.rank = placement.workers, placement.rank
        self.graph = tf.compat.v1.get_default_graph()

    def key(self, kind: str, value: tf.Tensor) -> int:
        """Returns the next collective's key: on all workers the same, and for each form its own."""
        identity = f"{self.name} {self.made} {kind} {value.dtype.name} {value.shape}"
        self.made += 1
        key = zlib.crc32(identity.encode()) & 0x7FFF_FFFF
        while _identities.setdefault(key, identity) != identity:
            key = (key + 1) & 0x7FFF_FFFF
        return key


_identities: dict[int, str] = {}
_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("_serving", default=None)


@contextlib.contextmanager
def serving(name: str, placement: Placement) -> Iterator[None]:
    """Inside, in replica context, collectives of the graph that is built have keys of our own.

    Args:
        name: of the graph, among those that one call of a compiled function runs.
    """
    serves = (
        placement.workers > 1
        and placement.local_replicas == 1
        and not placement.gpus
        and not tf.executing_eagerly()
    )
    token = _serving.set(_Serving(name, placement) if serves else None)
    try:
        yield
    finally:
        _serving.reset(token)


def _now(value: tf.Tensor) -> _Serving | None:
    """Returns what serves a tensor here: in the graph itself, where its shape is known."""
    found = _serving.get()
    here = found is not None and found.graph is tf.compat.v1.get_default_graph()
    return found if here and value.shape.is_fully_defined() else None


def workers_at(value: tf.Tensor) -> int | None:
    """Returns how many workers there are, where collectives of a tensor can be made here."""
    serves = _now(value)
    return None if serves is None else serves.workers


def swap(values: tf.Tensor) -> tf.Tensor:
    """Returns, from each worker, the row that has this worker's number: `[workers, ...]`.

    Where `workers_at` says that it can be.
    """
    serves = _now(values)
    assert serves is not None
    with tf.device("CPU:0"):
        found = tf.raw_ops.CollectiveAllToAllV2(
            input=values,
            group_size=serves.workers,
            group_key=GROUP_KEY,
            instance_key=serves.key("swap", values),
            ordering_token=[],
        )
    return tf.ensure_shape(found, values.shape)


def gather(value: tf.Tensor) -> tf.Tensor | None:
    """Returns each worker's value, `[workers, ...]` in their order; None where that cannot be."""
    serves = _now(value)
    if serves is None or value.dtype not in GATHERS:
        return None
    with tf.device("CPU:0"):
        found = tf.raw_ops.CollectiveGatherV2(
            input=value[tf.newaxis],
            group_size=serves.workers,
            group_key=GROUP_KEY,
            instance_key=serves.key("gather", value),
            ordering_token=[],
        )
    return tf.ensure_shape(found, [serves.workers, *value.shape])


def total(value: tf.Tensor) -> tf.Tensor | None:
    """Returns the sum of all workers' values, the same bits everywhere; None where it cannot be."""
    serves = _now(value)
    if serves is None:
        return None
    if value.dtype.size * value.shape.num_elements() <= GATHER_BYTES:
        everyone = gather(value)
        if everyone is not None:
            return tf.add_n(tf.unstack(everyone))
    with tf.device("CPU:0"):
        return tf.raw_ops.CollectiveReduceV2(
            input=value,
            group_size=serves.workers,
            group_key=GROUP_KEY,
            instance_key=serves.key("total", value),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )
