"""Sums and gathers between workers, over connections of our own (`channel`).

TensorFlow's collectives travel between CPUs by gRPC, which takes most of the time of a small
network's step: a sum of 7.4 MB between two workers of one machine takes 13 ms of a core. Here a
collective is two operations, one that gives this worker's part away and one that waits for the
others', so that what is computed meanwhile needs no thread of its own; all sums are TensorFlow's.
The parts are added in the order of the workers, or each sum is made in one place, so all workers
get the same bits.

The operations of a graph follow each other, as TensorFlow orders all that has effects. So workers
begin collectives in one order, and none waits for what another cannot begin: a worker that waits
has begun all before.

These serve a step's own graph (`serving`), between workers of one CPU replica each, where workers
reach each other. In functions of the user's own, in eager mode, on GPUs and within a process
callers do without, and use the replica context.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfmulti.distribution.bucket_sizes import GATHER_BYTES
from tfmulti.distribution.connections import channel_now, channel_of, noting
from tfmulti.distribution.strategies import Placement

SEND, RECEIVE = "links_send", "links_receive"  # names of the operations

Parts = list[tf.Tensor]


class _Serving:
    """The graph in which collectives get keys, by how many there were before in it."""

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.made, self.placement = name, 0, placement
        self.workers, self.rank = placement.workers, placement.rank
        self.graph = tf.compat.v1.get_default_graph()
        self.waits: list[tf.Operation] = []  # for other workers, in the order of the graph

    def key(self, dtype: tf.DType, shape: tf.TensorShape) -> int:
        """Returns the next collective's key: on all workers the same, and for each form its own."""
        identity = f"{self.name} {self.made} {dtype.name} {shape}"
        self.made += 1
        return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")

    def send(
        self, value: tf.Tensor, *, each_its_row: bool = False, any_rows: bool = False
    ) -> Callable[[], Parts]:
        """Gives all of `value` to each other worker, or each its row of it.

        Args:
            any_rows: the others may give another number of rows.

        Returns:
            What to call for what they gave, with this worker's own, in the workers' order.
        """
        shape = tf.TensorShape([None, *value.shape[1:]]) if any_rows else value.shape
        key = self.key(value.dtype, shape)
        after = _last_sent.get(self.graph, [])
        sent = _send_op(self.placement, key, value, each_its_row, any_rows, after)
        _last_sent[self.graph] = [sent]
        own = value[self.rank] if each_its_row else value
        theirs = shape[1:] if each_its_row else shape

        def parts() -> Parts:
            with tf.control_dependencies([sent]):
                found = _receive_op(self.placement, key, value.dtype, theirs)
            self.waits.append(found[0].op)
            return [*found[: self.rank], own, *found[self.rank :]]

        return parts


def _send_op(
    placement: Placement,
    key: int,
    value: tf.Tensor,
    each_its_row: bool,
    any_rows: bool,
    after: Sequence[tf.Operation],
) -> tf.Operation:
    others = [other for other in range(placement.workers) if other != placement.rank]

    def send(value: np.ndarray) -> None:
        value = np.ascontiguousarray(value)
        given = [value[other] if each_its_row else value for other in others]
        channel_now(placement).send(key, given, are_rows=any_rows)

    with tf.control_dependencies(after):
        return tf.numpy_function(noting(send), [value], [], name=SEND)


def _receive_op(placement: Placement, key: int, dtype: tf.DType, shape: tf.TensorShape) -> Parts:
    numpy_dtype = dtype.as_numpy_dtype
    sizes = [-1 if size is None else size for size in shape]

    def receive() -> list[np.ndarray]:
        return [
            part.view(numpy_dtype).reshape(sizes) for part in channel_now(placement).receive(key)
        ]

    count = placement.workers - 1
    found = tf.numpy_function(noting(receive), [], [dtype] * count, name=RECEIVE)
    for part in found:
        part.set_shape(shape)
    return list(found)


_last_sent: weakref.WeakKeyDictionary[tf.Graph, list[tf.Operation]] = weakref.WeakKeyDictionary()
_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("_serving", default=None)


@contextlib.contextmanager
def serving(name: str, placement: Placement) -> Iterator[None]:
    """Inside, in replica context, collectives of the graph that is built are those of this module.

    Every worker comes here alike: the first time they connect.

    Args:
        name: of the graph, among those that one call of a compiled function runs.
    """
    links = None if tf.executing_eagerly() else channel_of(placement)
    token = _serving.set(None if links is None else _Serving(name, placement))
    try:
        yield
    finally:
        _serving.reset(token)


def _now() -> _Serving | None:
    """Returns what serves here: in the graph itself, and in no function within it."""
    found = _serving.get()
    here = found is not None and found.graph is tf.compat.v1.get_default_graph()
    return found if here else None


def waits() -> list[tf.Operation]:
    """Returns the operations of this graph, so far, that wait for other workers."""
    serves = _now()
    return [] if serves is None else serves.waits


def gather(value: tf.Tensor) -> tf.Tensor | None:
    """Returns each worker's value, `[workers, ...]` in their order; None where that cannot be."""
    serves = _now()
    if serves is None or not value.shape.is_fully_defined():
        return None
    return tf.stack(serves.send(value)())


def are_there() -> bool:
    """Whether the step that is traced now sums and gathers by this module, not by TensorFlow."""
    return _now() is not None


def begin_rows(values: Sequence[tf.Tensor]) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to gather the rows of tensors, of which workers may have different numbers.

    Returns:
        What to call for the rows of all workers, in their order; None where it cannot be.
    """
    serves = _now()
    if serves is None or not all(v.shape[1:].is_fully_defined() for v in values):
        return None
    begun = [serves.send(value, any_rows=True) for value in values]
    return lambda: [tf.concat(parts(), 0) for parts in begun]


def begin_totals(values: Sequence[tf.Tensor]) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to sum tensors of known shapes over all workers; each travels when it is computed.

    float16 and bfloat16 are added in float32, and rounded once. More than two workers add what is
    large in pieces, each in one place, and gather the sums: a reduce-scatter and an all-gather, as
    in Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
    2005. What is short, and of two workers, goes to all at once.

    Returns:
        What to call for the sums, the same bits everywhere; None where it cannot be.
    """
    serves = _now()
    if serves is None or not all(v.shape.is_fully_defined() for v in values):
        return None
    whole = [
        serves.workers == 2 or v.dtype.size * v.shape.num_elements() <= GATHER_BYTES for v in values
    ]
    pieces = [v if w else _pieces(v, serves.workers) for v, w in zip(values, whole, strict=True)]
    begun = [serves.send(piece, each_its_row=not w) for piece, w in zip(pieces, whole, strict=True)]

    def totals() -> list[tf.Tensor]:
        # Those who wait let others compute first, on a worker of one thread.
        with tf.control_dependencies(_last_sent.get(serves.graph, [])):
            sums = [_sum(parts()) for parts in begun]
        again = [None if w else serves.send(s) for s, w in zip(sums, whole, strict=True)]
        return [
            total if parts is None else _joined(parts(), value)
            for value, total, parts in zip(values, sums, again, strict=True)
        ]

    return totals


def _sum(parts: Parts) -> tf.Tensor:
    if len(parts) == 2:
        return tf.add(*parts)  # which has no order, and is rounded once in any type
    # As rows of one tensor: Grappler orders the inputs of an addition by their names, which differ
    # between workers.
    rows = tf.stack(parts)
    if rows.dtype not in (tf.float16, tf.bfloat16):
        return tf.reduce_sum(rows, 0)
    return tf.cast(tf.reduce_sum(tf.cast(rows, tf.float32), 0), rows.dtype)


def _pieces(value: tf.Tensor, workers: int) -> tf.Tensor:
    size = value.shape.num_elements()
    piece = -(-size // workers)
    padded = tf.pad(tf.reshape(value, [-1]), [[0, piece * workers - size]])
    return tf.reshape(padded, [workers, piece])


def _joined(parts: Parts, like: tf.Tensor) -> tf.Tensor:
    flat = tf.concat(parts, 0)[: like.shape.num_elements()]
    return tf.reshape(flat, like.shape)
