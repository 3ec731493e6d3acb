"""How long an all-reduce takes over several sizes, by the way that training sums gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmulti.distribution import collectives, replica_context
from tfmulti.distribution.strategies import placement_of

SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)  # bytes
_IN_A_CALL, _CALLS, _BESIDE = 4, 7, 32


def all_reduce_times(
    strategy: tf.distribute.Strategy, sizes: Sequence[int] = SIZES
) -> tuple[tuple[int, float], ...]:
    """Returns bytes and seconds of one all-reduce (a sum of float32) of each size.

    The median over calls of four after each other: each needs the one before it. Every worker
    calls it, with the same sizes.
    """
    return tuple((size, _seconds(strategy, size)) for size in sizes)


def message_seconds(strategy: tf.distribute.Strategy) -> float | None:
    """Returns what one message more takes of a worker that tells all others at once.

    Of many short ones that are under way together, less one by itself. None where TensorFlow's
    collectives serve. Every worker calls it.
    """
    place, serves = placement_of(strategy), []

    def beside(count: int) -> float:
        def on_replica() -> tf.Tensor:
            with collectives.serving(f"bench beside {count}", place):
                begun = collectives.begin_totals([tf.ones([16]) for _ in range(count)])
                serves.append(begun is not None)
                return tf.add_n([part[0] for part in begun()]) if begun else tf.constant(0.0)

        return _median_of_calls(strategy, on_replica)

    one = beside(1)
    if not all(serves):
        return None
    return max(0.0, (beside(1 + _BESIDE) - one) / _BESIDE / (place.workers - 1))


def _seconds(strategy: tf.distribute.Strategy, size: int) -> float:
    count, place = max(1, size // 4), placement_of(strategy)
    values = tf.Variable(tf.ones([count]))  # a constant's sum would be made once, as it is compiled

    def on_replica() -> tf.Tensor:
        value = values.value()
        # Each replica's own: of what is alike in one graph TensorFlow makes one.
        part = (1 + replica_context.local_index(place.local_replicas) / 1024) / place.replicas
        with collectives.serving("bench", place):
            for _ in range(_IN_A_CALL):
                value = replica_context.total(part * value)
        return value[0]

    return _median_of_calls(strategy, on_replica) / _IN_A_CALL


def _median_of_calls(
    strategy: tf.distribute.Strategy, on_replica: Callable[[], tf.Tensor]
) -> float:
    def everywhere() -> Any:
        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    call = tf.function(everywhere, autograph=False)
    times = []
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        float(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one is traced
