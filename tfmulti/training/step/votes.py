"""Small collectives between workers outside of a step: votes, and numbers of each worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.strategies import placement_of
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.step.step_result import first_local


# A process has one strategy, seldom two.
@functools.lru_cache(maxsize=4)
def make_vote(strategy: tf.distribute.Strategy) -> Callable[[Sequence[float]], list[float]]:
    """Returns `vote(values)`, which returns each value summed over the replicas of all workers.

    `vote` is a collective: every worker must call it, with as many values.
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
    """Returns the exact numbers that each worker gives, in the order of the ranks.

    This is a collective: every worker must call it, with as many numbers.

    Args:
        strategy: the strategy of the run.
        values: whole numbers from 0 to 65,535. Float32 holds these exactly, also multiplied by the
            replicas of a worker, up to 256.
    """
    place = placement_of(strategy)
    if place.workers == 1:
        return [list(values)]
    own = [0.0] * (len(values) * place.workers)
    own[place.rank * len(values) : (place.rank + 1) * len(values)] = map(float, values)
    counted = [round(total / place.local_replicas) for total in make_vote(strategy)(own)]
    return [counted[at : at + len(values)] for at in range(0, len(counted), len(values))]
