"""Sharding: which rows of a global batch each replica trains on.

Let B be the global batch size. The rows of global batch k of an epoch are the positions k·B to
k·B + B - 1 of that epoch's order. They depend on (seed, epoch, k), and not on the number of
workers. Each of the R replicas, counted over all workers, takes a slice of neighbouring rows. Of n
rows, with q = n // R and m = n mod R, replica r takes

    [r·q + min(r, m), (r + 1)·q + min(r + 1, m))

So the slices differ by one row at most. This is the block distribution of MPI programs, with the
larger blocks first.

The functions use only `+ - * //` and `minimum`, a function that returns the smaller of two numbers.
So the same formula works on Python's integers and, with `tf.minimum`, on the tensors of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Minimum = Callable[[Any, Any], Any]


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Returns how many global batches hold all examples once; the last one may be smaller.

    >>> steps_per_epoch(100, 30)
    4
    """
    return -(-examples // global_batch_size)


def batch_bounds(
    step: Any, examples: int, global_batch_size: int, minimum: Minimum = min
) -> tuple[Any, Any]:
    """Returns the positions [start, stop) of a global batch in the epoch's order.

    Args:
        step: the index of the global batch within the epoch.
        examples: the number of examples of an epoch.
        global_batch_size: the rows of a global batch.
        minimum: a function that returns the smaller of two numbers, such as `tf.minimum`.

    >>> [batch_bounds(k, 100, 30) for k in range(4)]
    [(0, 30), (30, 60), (60, 90), (90, 100)]
    """
    start = step * global_batch_size
    return minimum(start, examples), minimum(start + global_batch_size, examples)


def rows_to_read(start: Any, stop: Any, rows: Any, minimum: Minimum = min) -> tuple[Any, Any]:
    """Returns the rows [first, last) that a replica reads: its own rows, or one row if it has none.

    The replica has the rows [start, stop) of a global batch of `rows` rows.
    A replica without rows reads the last row of the batch, and this row does not count. Layers
    cannot compute without rows, for example the gradient of a convolution, batch statistics or a
    mean.

    >>> rows_to_read(3, 5, rows=9), rows_to_read(9, 9, rows=9)
    ((3, 5), (8, 9))
    """
    first = minimum(start, rows - 1)
    # The larger of two numbers, written with `minimum`: max(a, b) = -min(-a, -b).
    return first, -minimum(-stop, -(first + 1))


def slice_bounds(rows: Any, replicas: int, replica: Any, minimum: Minimum = min) -> tuple[Any, Any]:
    """Returns the rows [start, stop) of a global batch that one replica takes.

    `replica` counts over all workers. The first `rows % replicas` replicas take one row more than
    the others. If there are fewer rows than replicas, the last replicas take none.

    >>> [stop - start for start, stop in (slice_bounds(30, 8, r) for r in range(8))]
    [4, 4, 4, 4, 4, 4, 3, 3]
    """
    quotient = rows // replicas
    remainder = rows - quotient * replicas
    start = replica * quotient + minimum(replica, remainder)
    stop = (replica + 1) * quotient + minimum(replica + 1, remainder)
    return start, stop
