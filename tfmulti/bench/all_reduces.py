"""Measures how long an all-reduce of several sizes takes, in the way that training sums gradients.

A call of a compiled function runs four all-reduces, each of which needs the result of the one
before. The time of an all-reduce is a quarter of the median call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmulti.distribution import collectives, replica_context
from tfmulti.distribution.strategies import placement_of

SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)  # bytes
_IN_A_CALL, _CALLS, _AT_ONCE = 4, 7, 32


def all_reduce_times(
    strategy: tf.distribute.Strategy, sizes: Sequence[int] = SIZES
) -> tuple[tuple[int, float], ...]:
    """Returns the bytes and the seconds of one all-reduce, a sum of float32, for each size.

    The sizes are those of the summed tensor in bytes. Every worker must call this function with the
    same sizes.
    """
    return tuple((size, _seconds(strategy, size)) for size in sizes)


def message_seconds(strategy: tf.distribute.Strategy) -> float | None:
    """Returns the seconds that one more message takes, if a worker sends to all others at once.

    The function measures 33 short collectives that are under way together, and one alone. The
    difference is divided by 32 and by the number of other workers. Every worker must call this
    function.

    Returns:
        The seconds, or None if TensorFlow's collectives connect the workers.
    """
    placement, is_served = placement_of(strategy), []

    def seconds_of(count: int) -> float:
        """Returns the seconds of a call with some collectives that are under way together."""

        def on_replica() -> tf.Tensor:
            with collectives.serving(f"bench beside {count}", placement):
                totals = collectives.begin_totals([tf.ones([16]) for _ in range(count)])
                is_served.append(totals is not None)
                return tf.add_n([part[0] for part in totals()]) if totals else tf.constant(0.0)

        return _median_of_calls(strategy, on_replica)

    alone = seconds_of(1)
    if not all(is_served):
        return None
    return max(0.0, (seconds_of(1 + _AT_ONCE) - alone) / _AT_ONCE / (placement.workers - 1))


def _seconds(strategy: tf.distribute.Strategy, size: int) -> float:
    """Returns the seconds of one all-reduce of a size in bytes."""
    count, placement = max(1, size // 4), placement_of(strategy)
    # The sum of a constant would be computed only once, when the function is compiled.
    values = tf.Variable(tf.ones([count]))

    def on_replica() -> tf.Tensor:
        value = values.value()
        # Each replica has another value, because TensorFlow computes equal parts of a graph once.
        index = replica_context.local_index(placement.local_replicas)
        part = (1 + index / 1024) / placement.replicas
        with collectives.serving("bench", placement):
            for _ in range(_IN_A_CALL):
                value = replica_context.sum_with_gradient(part * value)
        return value[0]

    return _median_of_calls(strategy, on_replica) / _IN_A_CALL


def _median_of_calls(
    strategy: tf.distribute.Strategy, on_replica: Callable[[], tf.Tensor]
) -> float:
    """Returns the median seconds of calls that run a function on each replica."""

    def everywhere() -> Any:
        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    call = tf.function(everywhere, autograph=False)
    times = []
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        float(call())
        times.append(time.perf_counter() - began)
    # The first call is traced.
    return statistics.median(times[1:])
