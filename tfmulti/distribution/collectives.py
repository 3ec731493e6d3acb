"""Sums and gathers values between workers, over the TCP connections of `transport.channel`.

TensorFlow's own collectives between CPUs use gRPC, which takes most of the time of a small
network's step: a sum of 7.4 MB between two workers of one machine takes 13 ms of a core.

Here a collective is two operations of the graph. The send operation gives this worker's part to the
channel. The receive operation waits for the other workers' parts. TensorFlow computes other
operations between the two, without another thread. TensorFlow also computes the sums. Either every
worker adds the parts in the order of the ranks, or one worker computes the sum and sends it to the
others. So all workers get the same bits.

TensorFlow runs operations with side effects in the order in which they were added to the graph. A
step is a function of its own, so the collectives after it wait for values that it gives out when
its own have begun. So all workers begin their collectives in the same order, and a worker that
waits has begun all earlier ones. Therefore no deadlock is possible.

These collectives are for the graph of a step that is built inside `serving`. Each worker must have
one CPU replica, and must reach all other workers. Elsewhere, as in the user's own functions and in
eager mode, they return None. The caller then uses the replica context.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.distribution.bucket_sizes import GATHER_BYTES
from tfmulti.distribution.connections import (
    EXCHANGE_KEY,
    channel_now,
    channel_of,
    keeping_errors,
)
from tfmulti.distribution.strategies import Placement

# The names of the two operations of a collective.
SEND, RECEIVE = "links_send", "links_receive"

Parts = list[tf.Tensor]


class _StepGraph:
    """The graph of a step in which collectives are built, and how many it has so far.

    A collective's key is a hash of the graph's name and of this number, so it is the same on all
    workers.
    """

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.count, self.placement = name, 0, placement
        self.workers, self.rank = placement.workers, placement.rank
        self.graph = tf.compat.v1.get_default_graph()
        # The operations that wait for other workers, in the order of the graph.
        self.waits: list[tf.Operation] = []

    def key(self, dtype: tf.DType, shape: tf.TensorShape, purpose: str) -> int:
        """Returns the next collective's key, which depends on the type and shape, too."""
        identity = f"{self.name} {self.count} {dtype.name} {shape}"
        self.count += 1
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        _purposes[key] = f"collective {self.count} of the {self.name}: {purpose}"
        return key

    def send(
        self,
        value: tf.Tensor,
        purpose: str = "",
        *,
        one_row_each: bool = False,
        any_rows: bool = False,
    ) -> Callable[[], Parts]:
        """Sends a tensor to all other workers, and returns how to receive theirs.

        Args:
            value: this worker's part.
            purpose: a description of the value. If empty, the name of its operation is taken.
            one_row_each: whether each worker gets its own row of `value`, the one at its rank.
                Otherwise every worker gets all of it.
            any_rows: whether the workers' parts may have different numbers of rows.

        Returns:
            A function that makes the receive operation. It returns the parts of all workers in the
            order of their ranks, including this worker's own part.
        """
        shape = tf.TensorShape([None, *value.shape[1:]]) if any_rows else value.shape
        if not purpose and tf.is_symbolic_tensor(value):
            purpose = value.op.name
        key = self.key(value.dtype, shape, purpose or "a value")
        placement = self.placement
        others = [rank for rank in range(placement.workers) if rank != placement.rank]

        def send(value: np.ndarray) -> None:
            value = np.ascontiguousarray(value)
            parts = [value[rank] if one_row_each else value for rank in others]
            channel_now(placement).send(key, parts, are_rows=any_rows)

        with tf.control_dependencies(_last_sent.get(self.graph, [])):
            sent = tf.numpy_function(keeping_errors(send), [value], [], name=SEND)
        _last_sent[self.graph] = [sent]
        own_part = value[self.rank] if one_row_each else value
        received_shape = shape[1:] if one_row_each else shape

        def receive() -> Parts:
            with tf.control_dependencies([sent]):
                received = _receive_op(self.placement, key, value.dtype, received_shape)
            self.waits.append(received[0].op)
            return [*received[: self.rank], own_part, *received[self.rank :]]

        return receive


def _receive_op(placement: Placement, key: int, dtype: tf.DType, shape: tf.TensorShape) -> Parts:
    """Returns the other workers' parts, from the operation that waits for them."""
    numpy_dtype = dtype.as_numpy_dtype
    sizes = [-1 if size is None else size for size in shape]

    def receive() -> list[np.ndarray]:
        return [
            part.view(numpy_dtype).reshape(sizes) for part in channel_now(placement).receive(key)
        ]

    count = placement.workers - 1
    received = tf.numpy_function(keeping_errors(receive), [], [dtype] * count, name=RECEIVE)
    for part in received:
        part.set_shape(shape)
    return list(received)


# A description of each collective of this process, by its key.
_purposes: dict[int, str] = {EXCHANGE_KEY: "an exchange outside of a step"}


def purpose_of(key: int) -> str:
    """Returns a description of the collective with this key, such as the names of its variables."""
    return _purposes.get(key, "unknown collective")


# The last send operation of each graph, after which the next one runs.
_last_sent: weakref.WeakKeyDictionary[tf.Graph, list[tf.Operation]] = weakref.WeakKeyDictionary()
_current: contextvars.ContextVar[_StepGraph | None] = contextvars.ContextVar(
    "_current", default=None
)


@contextlib.contextmanager
def serving(name: str, placement: Placement, after: Any = ()) -> Iterator[None]:
    """Makes the graph that is built inside the context use the collectives of this module.

    All workers must enter the context, in replica context. They connect when they first do so.

    Args:
        name: a name of the graph, different from those of the other graphs that one call of a
            compiled function runs.
        placement: this process' place among the workers.
        after: a nest of values of another graph, as `begun` returns them. The collectives of this
            graph begin after those of the other one.
    """
    channel = None if tf.executing_eagerly() else channel_of(placement)
    step = None if channel is None else _StepGraph(name, placement)
    if step is not None and (tensors := [v for v in tf.nest.flatten(after) if tf.is_tensor(v)]):
        # The operation that computes the values may be a function, which ends later than that.
        _last_sent[step.graph] = [tf.identity(tensors[0]).op]
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def _building() -> _StepGraph | None:
    """Returns the graph of `serving` if it is built now; None inside a function within it."""
    step = _current.get()
    is_current = step is not None and step.graph is tf.compat.v1.get_default_graph()
    return step if is_current else None


def begun(values: Any) -> Any:
    """Returns a nest of the same tensors, which are there when all collectives have begun.

    A step is a function of its own within an execution, and TensorFlow may give out its values
    before the step has ended. See `serving`.
    """
    step = _building()
    if step is None:
        return values
    with tf.control_dependencies(_last_sent.get(step.graph, [])):
        return tf.nest.map_structure(lambda v: tf.identity(v) if tf.is_tensor(v) else v, values)


def waits() -> list[tf.Operation]:
    """Returns the operations of the current graph that wait for other workers."""
    step = _building()
    return [] if step is None else step.waits


def gather(value: tf.Tensor) -> tf.Tensor | None:
    """Returns `[workers, ...]`, each worker's value by its rank; None as in `begin_totals`."""
    step = _building()
    if step is None or not value.shape.is_fully_defined():
        return None
    return tf.stack(step.send(value)())


def are_in_use() -> bool:
    """Returns whether the graph that is built now uses the collectives of this module."""
    return _building() is not None


def begin_rows(values: Sequence[tf.Tensor]) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to gather the rows of all workers, which may have different numbers of rows.

    Returns:
        A function that returns the rows of all workers, in the order of their ranks. None if
        the current graph is not one of `serving`, or if a shape is not known beyond axis 0.
    """
    step = _building()
    if step is None or not all(v.shape[1:].is_fully_defined() for v in values):
        return None
    receivers = [step.send(value, any_rows=True) for value in values]
    return lambda: [tf.concat(receive(), 0) for receive in receivers]


def begin_totals(
    values: Sequence[tf.Tensor], purposes: Sequence[str] = ()
) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to sum tensors over all workers, and sends each tensor as soon as it is computed.

    Two workers send their whole tensors to each other, and both add them. More workers do so with
    tensors of up to `GATHER_BYTES`. They cut larger tensors into one piece for each worker. Each
    worker adds up one piece and sends the sum to the others. This is a reduce-scatter and an
    all-gather, as in Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH, 2005.

    float16 and bfloat16 are added in float32, and rounded once.

    Args:
        values: the tensors.
        purposes: a description of each tensor; empty if there are none.

    Returns:
        A function that returns the sums, which have the same bits on all workers. None if
        the current graph is not one of `serving`, or if a shape is not known.
    """
    step = _building()
    if step is None or not all(v.shape.is_fully_defined() for v in values):
        return None
    are_whole = [
        step.workers == 2 or v.dtype.size * v.shape.num_elements() <= GATHER_BYTES for v in values
    ]
    pieces = [v if w else _pieces(v, step.workers) for v, w in zip(values, are_whole, strict=True)]
    purposes = purposes or [""] * len(values)
    receivers = [
        step.send(piece, purpose, one_row_each=not w)
        for piece, w, purpose in zip(pieces, are_whole, purposes, strict=True)
    ]

    def totals() -> list[tf.Tensor]:
        # A worker may have a single thread for operations. So it must compute and send all its
        # values before it waits.
        with tf.control_dependencies(_last_sent.get(step.graph, [])):
            sums = [_sum(receive()) for receive in receivers]
        receivers_of_sums = [
            None if w else step.send(s, purpose)
            for s, w, purpose in zip(sums, are_whole, purposes, strict=True)
        ]
        return [
            total if receive is None else _joined(receive(), value)
            for value, total, receive in zip(values, sums, receivers_of_sums, strict=True)
        ]

    return totals


def _sum(parts: Parts) -> tf.Tensor:
    """Returns the sum of the parts, the same bits on all workers."""
    # A sum of two numbers does not depend on the order, and is rounded once in any type.
    if len(parts) == 2:
        return tf.add(*parts)
    # The parts are rows of one tensor, because Grappler orders the inputs of an addition by their
    # names, which differ between workers.
    rows = tf.stack(parts)
    if rows.dtype not in (tf.float16, tf.bfloat16):
        return tf.reduce_sum(rows, 0)
    return tf.cast(tf.reduce_sum(tf.cast(rows, tf.float32), 0), rows.dtype)


def _pieces(value: tf.Tensor, workers: int) -> tf.Tensor:
    """Returns a tensor as [workers, size of a piece], filled up with zeros."""
    size = value.shape.num_elements()
    piece = -(-size // workers)
    padded = tf.pad(tf.reshape(value, [-1]), [[0, piece * workers - size]])
    return tf.reshape(padded, [workers, piece])


def _joined(parts: Parts, like: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with the shape of `like` from its pieces."""
    flat = tf.concat(parts, 0)[: like.shape.num_elements()]
    return tf.reshape(flat, like.shape)
