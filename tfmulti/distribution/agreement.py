"""Gathers whole numbers or bytes of all workers on every worker, without rounding.

Workers use this where they must decide alike outside of a step: for votes at the end of an epoch,
for digests of the data, and for bytes that the chief alone reads, such as a checkpoint.

The workers send the bytes over their channel (`connections.exchange`), also on GPUs. A worker may
end right after an exchange, because TCP still delivers its last message. Where there is no channel,
TensorFlow's own collective is used. It can fail on a worker if another one ends right after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfmulti.distribution import connections
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.launch.heartbeat import heartbeat

_BYTES = b"+"
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
    data = np.array(values, np.int64).tobytes()
    # The launcher must know that this worker may wait for others, and is not stuck by itself.
    with heartbeat().working(gather):
        parts = connections.exchange(placement_of(strategy), f"{len(values)} numbers", data)
    return [np.frombuffer(part, np.int64).tolist() for part in parts]


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
        parts = connections.exchange(placement_of(strategy), "bytes", _packed(data))
    return [_unpacked(part) for part in parts]


def _packed(data: bytes | None) -> bytes:
    """Returns the message of some bytes, in which no bytes and empty bytes differ."""
    return b"" if data is None else _BYTES + data


def _unpacked(message: bytes) -> bytes | None:
    return message.removeprefix(_BYTES) if message else None


class _Exchange:
    """The kind of one exchange of bytes, for the heartbeat."""


def broadcast(strategy: tf.distribute.Strategy, data: bytes | None) -> bytes | None:
    """Returns the chief's `data` on every worker, or None if the chief has None.

    This is a collective: every worker must call it.

    Args:
        strategy: the strategy of the run.
        data: the bytes to send; only the chief's count.
    """
    if placement_of(strategy).workers == 1:
        return data
    with heartbeat().working(_Exchange()):
        message = connections.broadcast(placement_of(strategy), "bytes of the chief", _packed(data))
    return _unpacked(message)


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
