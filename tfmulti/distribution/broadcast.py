"""Gives all workers the bytes of one worker.

The bytes travel as int32 numbers in an all-reduce, to which the other workers add 0. A sum of
floats would lose the sign of a zero. The message's length travels first. So only one worker, such
as the chief, needs to see a file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError

# The int32 numbers of one collective, which are 4 MiB.
_CHUNK = 1 << 20
_MADE, _FAILED = b"+", b"-"


def broadcast(strategy: tf.distribute.Strategy, data: bytes | None, rank: int = 0) -> bytes | None:
    """Returns the `data` of worker `rank` on every worker, or None if that worker has None.

    All workers call it.

    Args:
        strategy: the strategy of all workers.
        data: the bytes to send; other workers' are ignored.
        rank: the worker that sends; 0 is the chief.
    """
    place = placement_of(strategy)
    if place.workers == 1:
        return data
    add = _make_sum(strategy)
    speaks = place.rank == rank
    mine = data if speaks else None
    size = -1 if mine is None else len(mine)
    # The length travels in two halves, since one int32 number would end at 2 GiB.
    halves = np.array([size >> 16, size & 0xFFFF] if speaks else [0, 0], np.int32)
    high, low = (int(n) for n in add(_padded(halves))[:2])
    size = (high << 16) | low
    if size < 0:
        return None
    numbers = -(-size // 4)
    whole = np.zeros(numbers, np.int32)
    if mine is not None:
        whole = np.frombuffer(mine.ljust(4 * numbers, b"\0"), np.int32)
    parts = [add(_padded(whole[at : at + _CHUNK])) for at in range(0, numbers, _CHUNK)]
    joined = np.concatenate([*parts, np.zeros(0, np.int32)])
    return joined.tobytes()[:size]


def from_chief(strategy: tf.distribute.Strategy, make: Callable[[], bytes]) -> bytes:
    """Returns on every worker what `make` returns on the chief. All workers call it.

    Args:
        strategy: the strategy of all workers.
        make: makes the bytes; called on the chief alone.

    Raises:
        DataError: `make` has raised it on the chief. Every worker raises it, so none waits for the
            chief.
    """
    answer = None
    if placement_of(strategy).is_chief:
        try:
            answer = _MADE + make()
        except DataError as error:
            answer = _FAILED + str(error).encode()
    answer = broadcast(strategy, answer)
    assert answer is not None
    if answer.startswith(_FAILED):
        raise DataError(answer.removeprefix(_FAILED).decode())
    return answer.removeprefix(_MADE)


def _padded(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers filled up with zeros to the length of one chunk."""
    return np.pad(numbers, (0, _CHUNK - len(numbers)))


@functools.lru_cache(maxsize=4)
def _make_sum(strategy: tf.distribute.Strategy) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that sums one chunk of int32 numbers over all workers."""

    def on_replica(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        first = replica_context.local_index(placement_of(strategy).local_replicas) == 0
        # The identity places the value on the replica's device, where the argument is not.
        return context.all_reduce(replica_context.SUM, tf.identity(values) * int(first))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def total(values: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

    def add(values: np.ndarray) -> np.ndarray:
        result: np.ndarray = total(tf.constant(values)).numpy()
        return result

    return add
