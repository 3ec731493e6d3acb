"""Counts what the workers say outside of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.strategies import placement_of
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.step.step_result import first_local


@functools.lru_cache(maxsize=4)  # strategies: a process has one, seldom two
def make_vote(strategy: tf.distribute.Strategy) -> Callable[[Sequence[float]], list[float]]:
    """Returns `vote(values)`: each value summed over the replicas of all workers.

    Every worker must call it: it is a collective.
    """

    def total(values: tf.Tensor) -> tf.Tensor:
        return first_local(
            strategy, strategy.run(lambda: replica_context.sum_together([values])[0])
        )

    compiled = tf.function(total, autograph=False)

    def vote(values: Sequence[float]) -> list[float]:
        with heartbeat().working(compiled):
            counted: list[float] = compiled(tf.constant(values, tf.float32)).numpy().tolist()
        return counted

    return vote


def gather(strategy: tf.distribute.Strategy, values: Sequence[int]) -> list[list[int]]:
    """Returns the numbers that each worker gives, by its rank, exactly.

    Every worker must call it with as many: it is a collective.

    Args:
        values: from 0 to 65,535, so that float32 holds them times 256 replicas of a worker.
    """
    place = placement_of(strategy)
    if place.workers == 1:
        return [list(values)]
    own = [0.0] * (len(values) * place.workers)
    own[place.rank * len(values) : (place.rank + 1) * len(values)] = map(float, values)
    counted = [round(total / place.local_replicas) for total in make_vote(strategy)(own)]
    return [counted[at : at + len(values)] for at in range(0, len(counted), len(values))]
