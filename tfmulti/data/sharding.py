"""Which examples each replica trains on: arithmetic alone.

The rows of global batch `k` of an epoch are positions `k·B … k·B + B - 1` of that epoch's
order; they depend on (seed, epoch, k) and not on how many workers share them. Replica `r`
of `R` (counted over all workers) takes one run of neighbouring rows, and no two replicas'
runs differ by more than one row.

The functions use `+ - * //` and the given `minimum` only, so the same formula serves
Python's integers here and TensorFlow's tensors inside a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Minimum = Callable[[Any, Any], Any]


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Returns how many global batches hold all examples once; the last may be smaller.

    >>> steps_per_epoch(100, 30)
    4
    """
    return -(-examples // global_batch_size)


def batch_bounds(
    step: Any, examples: int, global_batch_size: int, minimum: Minimum = min
) -> tuple[Any, Any]:
    """Returns the positions [start, stop) of global batch `step` in the epoch's order.

    >>> [batch_bounds(k, 100, 30) for k in range(4)]
    [(0, 30), (30, 60), (60, 90), (90, 100)]
    """
    start = step * global_batch_size
    return minimum(start, examples), minimum(start + global_batch_size, examples)


def rows_to_read(start: Any, stop: Any, rows: Any, minimum: Minimum = min) -> tuple[Any, Any]:
    """Returns the rows that a replica reads for its share: the share itself, or one row.

    A replica without rows reads the batch's last row and counts it for nothing: layers (a
    convolution's gradient, batch statistics, a mean) cannot do with none.

    >>> rows_to_read(3, 5, rows=9), rows_to_read(9, 9, rows=9)
    ((3, 5), (8, 9))
    """
    first = minimum(start, rows - 1)
    return first, -minimum(-stop, -(first + 1))


def share_bounds(rows: Any, replicas: int, replica: Any, minimum: Minimum = min) -> tuple[Any, Any]:
    """Returns the rows [start, stop) of a global batch that one replica takes.

    The first `rows % replicas` replicas take one row more than the others; where there are
    fewer rows than replicas, the last replicas take none.

    >>> [stop - start for start, stop in (share_bounds(30, 8, r) for r in range(8))]
    [4, 4, 4, 4, 4, 4, 3, 3]
    """
    each = rows // replicas
    left_over = rows - each * replicas
    start = replica * each + minimum(replica, left_over)
    stop = (replica + 1) * each + minimum(replica + 1, left_over)
    return start, stop
