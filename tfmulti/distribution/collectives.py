"""Sums and gathers values between workers, over TCP connections of the project's own (`channel`).

TensorFlow's collectives travel between CPUs by gRPC, which takes most of the time of a small
network's step: a sum of 7.4 MB between two workers of one machine takes 13 ms of a core.

Here a collective is two operations of the graph. The send operation gives this worker's part to the
channel. The receive operation waits for the other workers' parts. What TensorFlow computes between
the two needs no thread of its own. TensorFlow makes all sums. Either every worker adds the parts in
the order of the ranks, or one worker makes the sum and sends it to the others. So all workers get
the same bits.

TensorFlow runs the operations of a graph that have effects in the order in which they were made. So
all workers begin their collectives in the same order, and a worker that waits has begun all earlier
ones. Therefore no worker waits for something that another worker cannot begin.

These collectives serve the graph of a step that is built inside `serving`. They need workers with
one CPU replica each that can reach each other. In the user's own functions, in eager mode, on GPUs
and within one process the functions here return None, and the caller uses the replica context.
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

# The names of the two operations of a collective.
SEND, RECEIVE = "links_send", "links_receive"

Parts = list[tf.Tensor]


class _Serving:
    """The graph in which collectives are made, and how many it has so far.

    A collective's key is a hash of the graph's name and of this number, so it is the same on all
    workers.
    """

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.made, self.placement = name, 0, placement
        self.workers, self.rank = placement.workers, placement.rank
        self.graph = tf.compat.v1.get_default_graph()
        # The operations that wait for other workers, in the order of the graph.
        self.waits: list[tf.Operation] = []

    def key(self, dtype: tf.DType, shape: tf.TensorShape, purpose: str) -> int:
        """Returns the next collective's key, which depends on the type and shape, too."""
        identity = f"{self.name} {self.made} {dtype.name} {shape}"
        self.made += 1
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        _purposes[key] = f"collective {self.made} of the {self.name}: {purpose}"
        return key

    def send(
        self,
        value: tf.Tensor,
        purpose: str = "",
        *,
        each_its_row: bool = False,
        any_rows: bool = False,
    ) -> Callable[[], Parts]:
        """Sends a tensor to all other workers, and returns how to receive theirs.

        Args:
            value: this worker's part.
            purpose: what is sent, in words. Empty: the name of the operation that makes it.
            each_its_row: whether each worker gets its own row of `value`, the one at its rank.
                Otherwise every worker gets all of it.
            any_rows: whether the workers' parts may have different numbers of rows.

        Returns:
            A function that makes the receive operation. It returns the parts of all workers in the
            order of their ranks, with this worker's own.
        """
        shape = tf.TensorShape([None, *value.shape[1:]]) if any_rows else value.shape
        if not purpose and tf.is_symbolic_tensor(value):
            purpose = value.op.name
        key = self.key(value.dtype, shape, purpose or "a value")
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
    """Returns the operation that gives this worker's part to the channel.

    Args:
        placement: this process' place among the workers.
        key: the collective's key.
        value: this worker's part.
        each_its_row: whether each worker gets its own row of `value`.
        any_rows: whether the workers' values may have different numbers of rows.
        after: the operations that must run before.
    """
    others = [other for other in range(placement.workers) if other != placement.rank]

    def send(value: np.ndarray) -> None:
        value = np.ascontiguousarray(value)
        given = [value[other] if each_its_row else value for other in others]
        channel_now(placement).send(key, given, are_rows=any_rows)

    with tf.control_dependencies(after):
        return tf.numpy_function(noting(send), [value], [], name=SEND)


def _receive_op(placement: Placement, key: int, dtype: tf.DType, shape: tf.TensorShape) -> Parts:
    """Returns the other workers' parts, from the operation that waits for them."""
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


# What each collective of the graphs of this process is for, in words, by its key.
_purposes: dict[int, str] = {}


def purpose_of(key: int) -> str:
    """Returns what the collective of a key is for, in words, such as the variables' names."""
    return _purposes.get(key, "unknown collective")


# The last send operation of each graph, after which the next one runs.
_last_sent: weakref.WeakKeyDictionary[tf.Graph, list[tf.Operation]] = weakref.WeakKeyDictionary()
_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("_serving", default=None)


@contextlib.contextmanager
def serving(name: str, placement: Placement) -> Iterator[None]:
    """Makes collectives of the graph that is built inside the context those of this module.

    All workers enter the context alike, in replica context. The first time, they connect.

    Args:
        name: a name of the graph, different from those of the other graphs that one call of a
            compiled function runs.
        placement: this process' place among the workers.
    """
    channel = None if tf.executing_eagerly() else channel_of(placement)
    token = _serving.set(None if channel is None else _Serving(name, placement))
    try:
        yield
    finally:
        _serving.reset(token)


def _now() -> _Serving | None:
    """Returns what serves the graph that is built now, or None.

    It is None in a function within the graph of `serving`.
    """
    found = _serving.get()
    here = found is not None and found.graph is tf.compat.v1.get_default_graph()
    return found if here else None


def waits() -> list[tf.Operation]:
    """Returns the operations of this graph, so far, that wait for other workers."""
    serves = _now()
    return [] if serves is None else serves.waits


def gather(value: tf.Tensor) -> tf.Tensor | None:
    """Returns each worker's value, `[workers, ...]` in the order of ranks; None if it cannot."""
    serves = _now()
    if serves is None or not value.shape.is_fully_defined():
        return None
    return tf.stack(serves.send(value)())


def are_there() -> bool:
    """Returns whether the graph that is built now sums and gathers by this module."""
    return _now() is not None


def begin_rows(values: Sequence[tf.Tensor]) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to gather the rows of all workers, which may have different numbers of rows.

    Returns:
        A function that returns the rows of all workers, in the order of their ranks. None if this
        module does not serve here, or if a shape is not known beyond axis 0.
    """
    serves = _now()
    if serves is None or not all(v.shape[1:].is_fully_defined() for v in values):
        return None
    begun = [serves.send(value, any_rows=True) for value in values]
    return lambda: [tf.concat(parts(), 0) for parts in begun]


def begin_totals(
    values: Sequence[tf.Tensor], purposes: Sequence[str] = ()
) -> Callable[[], list[tf.Tensor]] | None:
    """Begins to sum tensors over all workers; each is sent as soon as it is computed.

    Two workers send their whole tensors to each other, and both add them. More workers do so with
    tensors of up to `GATHER_BYTES`. They cut larger tensors into one piece for each worker. Each
    worker adds up one piece and sends the sum to the others. This is a reduce-scatter and an
    all-gather, as in Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH, 2005.

    float16 and bfloat16 are added in float32, and rounded once.

    Args:
        values: the tensors.
        purposes: what each of them is, in words; empty if that is not known.

    Returns:
        A function that returns the sums, which have the same bits on all workers. None if this
        module does not serve here, or if a shape is not known.
    """
    serves = _now()
    if serves is None or not all(v.shape.is_fully_defined() for v in values):
        return None
    whole = [
        serves.workers == 2 or v.dtype.size * v.shape.num_elements() <= GATHER_BYTES for v in values
    ]
    pieces = [v if w else _pieces(v, serves.workers) for v, w in zip(values, whole, strict=True)]
    named = purposes or [""] * len(pieces)
    begun = [
        serves.send(piece, purpose, each_its_row=not w)
        for piece, w, purpose in zip(pieces, whole, named, strict=True)
    ]

    def totals() -> list[tf.Tensor]:
        # A worker may have a single thread for operations. So it computes and sends everything
        # before it waits.
        with tf.control_dependencies(_last_sent.get(serves.graph, [])):
            sums = [_sum(parts()) for parts in begun]
        again = [
            None if w else serves.send(s, purpose)
            for s, w, purpose in zip(sums, whole, named, strict=True)
        ]
        return [
            total if parts is None else _joined(parts(), value)
            for value, total, parts in zip(values, sums, again, strict=True)
        ]

    return totals


def _sum(parts: Parts) -> tf.Tensor:
    """Returns the sum of the parts, the same bits on all workers."""
    # A sum of two has no order, and is rounded once in any type.
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
    """Returns a tensor like `like` from its pieces."""
    flat = tf.concat(parts, 0)[: like.shape.num_elements()]
    return tf.reshape(flat, like.shape)
