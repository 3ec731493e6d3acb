"""Gathers whole numbers or bytes of all workers on every worker, without rounding.

Workers use this where they must decide alike outside of a step: for votes at the end of an epoch,
for digests of the data, and for bytes that the chief alone reads, such as a checkpoint.

Each worker puts its values into its own place of a vector of int32 numbers, and 0 into the places
of the others. One all-reduce adds these vectors. Adding 0 changes no bit of a whole number, while a
sum of floats would round, and would lose the sign of a zero. A vector is filled up to a power of
two, so that TensorFlow traces few lengths. A long one is sent in pieces of 4 MiB.

Where the workers have a channel, these sums go over it. So a worker may end right after one: TCP
still delivers what it has sent. TensorFlow's own collective can fail on a worker that has not got
the last message yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfmulti.distribution import collectives, connections, replica_context
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.launch.heartbeat import heartbeat

# The shortest and the longest all-reduce, in int32 numbers.
_MIN_LENGTH, _MAX_LENGTH = 16, 1 << 20
_OK, _FAILED = b"+", b"-"
# Within a step, whole numbers travel as float32 in the collective of the metrics. Up to this number
# their sums are exact. As int32 they would need a collective of their own in each execution.
MOST_EXACT = 1 << 24


def gather(strategy: tf.distribute.Strategy, values: Sequence[int]) -> list[list[int]]:
    """Returns the whole numbers that each worker gives, in the order of the ranks.

    This is a collective: every worker must call it, with as many numbers.

    Args:
        strategy: the strategy of the run.
        values: whole numbers from -2**63 to 2**63 - 1.
    """
    if placement_of(strategy).workers == 1:
        return [[int(value) for value in values]]
    # The launcher must know that this worker may wait for others, and is not stuck by itself.
    with heartbeat().working(gather):
        return _gathered(strategy, values)


def _gathered(strategy: tf.distribute.Strategy, values: Sequence[int]) -> list[list[int]]:
    """Does the work of `gather` on several workers."""
    placement = placement_of(strategy)
    all_values = np.zeros((placement.workers, len(values)), np.int64)
    all_values[placement.rank] = values
    summed = _summed(strategy, all_values.reshape(-1).view(np.int32)).view(np.int64)
    gathered: list[list[int]] = summed.reshape(all_values.shape).tolist()
    return gathered


def gather_bytes(strategy: tf.distribute.Strategy, data: bytes | None) -> list[bytes | None]:
    """Returns the bytes that each worker gives, in the order of the ranks.

    This is a collective: every worker must call it. The bytes may differ in length, and None
    stands for a worker that gives nothing.

    Args:
        strategy: the strategy of the run.
        data: the bytes of this worker, or None.
    """
    if placement_of(strategy).workers == 1:
        return [data]
    # The time of an exchange depends on the bytes, so it tells nothing about any other exchange.
    with heartbeat().working(_Exchange()):
        return _gathered_bytes(strategy, data)


class _Exchange:
    """The kind of one exchange of bytes, for the heartbeat."""


def _gathered_bytes(strategy: tf.distribute.Strategy, data: bytes | None) -> list[bytes | None]:
    """Does the work of `gather_bytes` on several workers."""
    placement = placement_of(strategy)
    sizes = [size for (size,) in _gathered(strategy, [-1 if data is None else len(data)])]
    # Each worker's bytes are filled up to whole int32 numbers.
    ends = np.cumsum([-(-max(size, 0) // 4) for size in sizes])
    numbers = np.zeros(ends[-1], np.int32)
    own_start = int(ends[placement.rank - 1]) if placement.rank else 0
    if data:
        own_numbers = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), np.int32)
        numbers[own_start : own_start + len(own_numbers)] = own_numbers
    all_bytes = _summed(strategy, numbers).tobytes() if len(numbers) else b""
    starts = [0, *(4 * int(end) for end in ends[:-1])]
    return [
        None if size < 0 else all_bytes[start : start + size]
        for start, size in zip(starts, sizes, strict=True)
    ]


def broadcast(strategy: tf.distribute.Strategy, data: bytes | None) -> bytes | None:
    """Returns the chief's `data` on every worker, or None if the chief has None.

    This is a collective: every worker must call it.

    Args:
        strategy: the strategy of the run.
        data: the bytes to send; only the chief's count.
    """
    return gather_bytes(strategy, data if placement_of(strategy).is_chief else None)[0]


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
            answer = _OK + make()
        except DataError as error:
            answer = _FAILED + str(error).encode()
    answer = broadcast(strategy, answer)
    assert answer is not None
    if answer.startswith(_FAILED):
        raise DataError(answer.removeprefix(_FAILED).decode())
    return answer.removeprefix(_OK)


def _summed(strategy: tf.distribute.Strategy, numbers: np.ndarray) -> np.ndarray:
    """Returns int32 numbers, each summed over all workers."""
    total, sums = _make_sum(strategy), []
    for start in range(0, len(numbers), _MAX_LENGTH):
        piece = numbers[start : start + _MAX_LENGTH]
        length = max(_MIN_LENGTH, 1 << (len(piece) - 1).bit_length())
        padded = np.pad(piece, (0, length - len(piece)))
        with connections.own_errors(placement_of(strategy)):
            sums.append(total(tf.constant(padded)).numpy()[: len(piece)])
    return np.concatenate(sums)


# A process has one strategy, seldom two.
@functools.lru_cache(maxsize=4)
def _make_sum(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that sums int32 numbers over all workers, once for each worker."""
    placement = placement_of(strategy)

    def on_replica(values: tf.Tensor) -> tf.Tensor:
        first = replica_context.local_index(placement.local_replicas) == 0
        # The identity places the value on the replica's device, where the argument is not.
        own_values = tf.identity(values) * int(first)
        with collectives.serving("agreement", placement):
            return replica_context.sum_by_dtype([own_values])[0]

    def total(values: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

    compiled: Callable[[tf.Tensor], tf.Tensor] = tf.function(total, autograph=False)
    return compiled
