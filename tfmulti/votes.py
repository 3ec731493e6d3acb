"""Counts what the workers say outside of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmulti import replicas
from tfmulti.launched import teller
from tfmulti.outcomes import first_local


@functools.lru_cache(maxsize=4)  # strategies: a process has one, seldom two
def make_vote(strategy: tf.distribute.Strategy) -> Callable[[Sequence[float]], list[float]]:
    """Returns `vote(values)`: each value summed over the replicas of all workers.

    Every worker must call it: it is a collective.
    """

    def total(values: tf.Tensor) -> tf.Tensor:
        return first_local(strategy, strategy.run(lambda: replicas.sum_together([values])[0]))

    compiled = tf.function(total, autograph=False)

    def vote(values: Sequence[float]) -> list[float]:
        with teller().working(id(compiled)):
            counted: list[float] = compiled(tf.constant(values, tf.float32)).numpy().tolist()
        return counted

    return vote
