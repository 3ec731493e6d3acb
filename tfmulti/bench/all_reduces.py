"""How long an all-reduce takes over several sizes, by the way that training sums gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmulti import collectives, replicas
from tfmulti.strategies import placement_of

SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)  # bytes
_IN_A_CALL, _CALLS = 4, 7


def all_reduce_times(
    strategy: tf.distribute.Strategy, sizes: Sequence[int] = SIZES
) -> tuple[tuple[int, float], ...]:
    """Returns bytes and seconds of one all-reduce (a sum of float32) of each size.

    The median over calls of four after each other: each needs the one before it. Every worker
    calls it, with the same sizes.
    """
    return tuple((size, _seconds(strategy, size)) for size in sizes)


def _seconds(strategy: tf.distribute.Strategy, size: int) -> float:
    count, place = max(1, size // 4), placement_of(strategy)

    def on_replica() -> tf.Tensor:
        value = tf.ones([count])
        with collectives.serving("bench", place):
            for _ in range(_IN_A_CALL):
                value = replicas.total(value) / place.replicas
        return value[0]

    def everywhere() -> Any:
        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    call = tf.function(everywhere, autograph=False)
    times = []
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        float(call())
        times.append((time.perf_counter() - began) / _IN_A_CALL)
    return statistics.median(times[1:])  # the first one is traced
