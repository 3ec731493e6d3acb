"""Holds this process' channel to the other workers, and converts its errors to TensorFlow's.

Steps use the channel if each worker has one CPU replica (`channel_of`). What the workers exchange
outside of a step goes over it in any case (`exchange`).

The workers connect in these steps, for which they use TensorFlow's own gather between CPUs:

1. Each worker listens at a free port, and tells all others its rank, that port and random bytes.
2. All workers compute one key from the job's secret and the random bytes of the chief.
3. Each two workers connect and prove to each other that they have the key (`rendezvous`).
4. Each worker tells whether it reaches all others. If one does not, no worker uses a channel, and
   TensorFlow exchanges everything.

While an exchange waits, TensorFlow is asked each second whether all workers are alive. If a worker
dies or freezes, the step ends with TensorFlow's own error, after TensorFlow's own time-out.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti.cluster.cluster import host_of
from tfmulti.cluster.job_secret import proof, secret_of
from tfmulti.cluster.listening import LOOPBACK, is_here, listen
from tfmulti.config.troubleshooting import documented
from tfmulti.distribution.strategies import Placement
from tfmulti.distribution.transport.channel import Channel, ChannelError, ExchangeRecord
from tfmulti.distribution.transport.rendezvous import connect_workers

# TensorFlow counts the keys of its own groups from 1.
_GROUP_KEY = 0x7466_6D75
# The key of all messages of `exchange`. The keys of a step are 64 bits of a hash.
EXCHANGE_KEY = 1
_PIECE_BYTES = 1 << 22

# The channels, by the addresses of all workers. None: one worker could not reach another.
_connected: dict[tuple[str, ...], Channel | None] = {}
# The channels that an error has ended, by the addresses of the workers, which must connect again.
_ended: dict[tuple[str, ...], Channel] = {}
# The errors of operations since `own_errors` was entered.
_raised: list[BaseException] = []


def channel_of(placement: Placement) -> Channel | None:
    """Returns the channel to all other workers, or None if TensorFlow must exchange the values.

    It is None for a single worker, for several replicas on each worker, on GPUs, and where one
    worker cannot reach another. All workers must call it. The first call connects them.
    """
    if placement.workers == 1 or not _serves_steps(placement):
        return None
    return _channel_between(placement)


def _serves_steps(placement: Placement) -> bool:
    """Returns whether steps use the channel: each worker has one replica, on a CPU."""
    return placement.local_replicas == 1 and not placement.gpus


def _channel_between(placement: Placement) -> Channel | None:
    """Returns the channel between several workers, or None if one cannot reach another."""
    if placement.addresses not in _connected:
        with tf.init_scope():
            _connected[placement.addresses] = _connect(placement)
    return _connected[placement.addresses]


def channel_now(placement: Placement) -> Channel:
    """Returns the channel that `channel_of` has made, for operations that run in a step.

    Raises:
        ChannelError: the connections have ended.
    """
    channel = _connected.get(placement.addresses)
    if channel is None:
        raise ChannelError(
            "the connections to the other workers have ended, and cannot be made again"
        )
    return channel


def made_channel(placement: Placement) -> Channel | None:
    """Returns what `channel_of` does, but None before the workers are connected."""
    return _connected.get(placement.addresses) if _serves_steps(placement) else None


def last_exchanges(placement: Placement) -> list[ExchangeRecord]:
    """Returns the last exchanges with other workers, even if an error has ended their channel."""
    channel = _connected.get(placement.addresses) or _ended.get(placement.addresses)
    return channel.last() if channel is not None else []


def _connect(placement: Placement) -> Channel | None:
    """Returns a new channel to all other workers; None if one worker cannot reach another."""
    hosts = [host_of(address) for address in placement.addresses]
    if all(map(is_here, set(hosts))):
        # All workers run on this machine, under one name or several.
        hosts = [LOOPBACK] * len(hosts)
    port, problem = 0, ""
    try:
        listener = listen(hosts[placement.rank], hosts)
        port = listener.getsockname()[1]
    except OSError as error:
        # The other workers are in the collective below, so this one must come there, too.
        problem = f"worker {placement.rank} cannot listen: {error}"
    token = np.frombuffer(secrets.token_bytes(16), np.int32)
    answers = _gather(placement, "where", [placement.rank, port, *token])
    # TensorFlow orders the workers by their numbers as text: 1, 10, 2.
    answers = answers[np.argsort(answers[:, 0])]
    listeners = list(zip(hosts, answers[:, 1].tolist(), strict=True))
    # TensorFlow's collectives are not encrypted. So without a secret the key only keeps other jobs
    # out.
    key = proof(secret_of(os.environ).encode(), b"workers", answers[0, 2:].tobytes())
    try:
        if problem:
            raise ChannelError(problem)
        connections = connect_workers(listener, placement.rank, listeners, key)
    except ChannelError as error:
        what = "gradients travel by gRPC, which is slower"
        if not _serves_steps(placement):
            what = "votes and checkpoints travel by gRPC"
        logging.warning(documented(f"{what}: {error}"))
        connections = None
    if not _gather(placement, "reached", [connections is not None]).all() or connections is None:
        for connection in (connections or {}).values():
            connection.close()
        return None
    return Channel(connections, lambda: _check(placement))


def exchange(placement: Placement, name: str, data: bytes) -> list[bytes]:
    """Returns the bytes that each worker gives, in the order of the ranks.

    This is a collective, for use outside of a step: every worker must call it. The bytes may differ
    in length.

    Args:
        placement: this process' place among the workers.
        name: the name of the exchange, which every worker must give alike.
        data: the bytes of this worker.

    Raises:
        tf.errors.OpError: another worker has ended, has failed, or exchanges something else.
    """
    with own_errors(placement):
        channel = _channel_between(placement)
        if channel is None:
            return _exchanged_by_tensorflow(placement, data)
        message = _named(name, data)
        received = _exchanged_by_channel(channel, placement, [message] * placement.workers)
        return [_unnamed(part, name, rank).tobytes() for rank, part in enumerate(received)]


def broadcast(placement: Placement, name: str, data: bytes) -> bytes:
    """Returns the chief's bytes on every worker, which all call it outside of a step.

    The chief sends each worker one piece, and each worker sends its piece to all others. So the
    chief sends all bytes about twice, for any number of workers. This is a scatter and an
    all-gather, as in Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH, 2005.

    Args:
        placement: this process' place among the workers.
        name: the name of the broadcast, which every worker must give alike.
        data: the bytes to send; only the chief's count.

    Raises:
        tf.errors.OpError: another worker has ended, has failed, or exchanges something else.
    """
    count = placement.workers
    with own_errors(placement):
        channel = _channel_between(placement)
        if channel is None:
            return _exchanged_by_tensorflow(placement, data if placement.is_chief else b"")[0]
        view = memoryview(data if placement.is_chief else b"")
        ends = [len(view) * i // count for i in range(count + 1)]
        pieces = [_named(name, view[ends[i] : ends[i + 1]]) for i in range(count)]
        received = _exchanged_by_channel(channel, placement, pieces)
        piece, *_ = (_unnamed(part, name, rank) for rank, part in enumerate(received))
        all_pieces = _exchanged_by_channel(channel, placement, [piece] * count)
        return data if placement.is_chief else b"".join(part.data for part in all_pieces)


def _named(name: str, data: bytes | memoryview) -> np.ndarray:
    """Returns a message that begins with the name of its exchange, which the receiver checks."""
    return np.frombuffer(b"".join((name.encode(), b"\0", data)), np.uint8)


def _unnamed(message: np.ndarray, name: str, rank: int) -> np.ndarray:
    """Returns the data of a message of the worker `rank`.

    Raises:
        tf.errors.UnavailableError: the message has another name.
    """
    start = name.encode() + b"\0"
    if message[: len(start)].tobytes() == start:
        return message[len(start) :]
    other = message[:80].tobytes().partition(b"\0")[0].decode(errors="replace")
    raise tf.errors.UnavailableError(
        None, None, f"worker {rank} is in another call: it sends {other!r}, and not {name!r}"
    )


def _exchanged_by_channel(
    channel: Channel, placement: Placement, parts: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Sends each worker its part, and returns the parts that all workers give this one."""
    rank = placement.rank
    try:
        channel.send(EXCHANGE_KEY, [*parts[:rank], *parts[rank + 1 :]])
        received = channel.receive(EXCHANGE_KEY)
    except ChannelError as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from None
    except BaseException:
        # Otherwise the next exchange would get the messages of this one.
        _end_channels()
        raise
    return [*received[:rank], parts[rank], *received[rank:]]


def _exchanged_by_tensorflow(placement: Placement, data: bytes) -> list[bytes]:
    """Does what `exchange` does if one worker cannot reach another by the channel.

    TensorFlow gathers rows of one length, and knows a row of another length by another name. So
    the bytes are filled up to a power of two, and long ones are sent in pieces.
    """

    def gathered(name: str, values: np.ndarray) -> list[np.ndarray]:
        rows = _gather(placement, name, np.append(np.int32(placement.rank), values))
        return [row[1:] for row in sorted(rows, key=lambda row: int(row[0]))]

    sizes = [
        int(row.copy().view(np.int64)[0])
        for row in gathered("sizes", np.array([len(data)], np.int64).view(np.int32))
    ]
    length = min(_PIECE_BYTES, 1 << max(6, (max(sizes) - 1).bit_length()))
    parts = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), length):
        piece = data[start : start + length].ljust(length, b"\0")
        for part, row in zip(
            parts, gathered(f"{length} bytes", np.frombuffer(piece, np.int32)), strict=True
        ):
            part += row.tobytes()
    return [bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _check(placement: Placement) -> None:
    """Raises TensorFlow's error if TensorFlow has found a worker dead or frozen."""
    _gather(placement, "alive", [1], alone=True)


def _gather(
    placement: Placement, name: str, values: Sequence[int] | np.ndarray, *, alone: bool = False
) -> np.ndarray:
    """Returns the values of each worker, as rows in any order, by TensorFlow's own collective.

    Args:
        placement: this process' place among the workers.
        name: a name for this use, the same on all workers.
        values: this worker's values.
        alone: whether this worker gathers from itself alone. Like every collective, this fails
            after another worker was lost.
    """
    with tf.device("CPU:0"):
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=tf.constant(np.asarray(values, np.int32)[np.newaxis]),
            group_size=1 if alone else placement.workers,
            group_key=_GROUP_KEY + (1 + placement.rank if alone else 0),
            instance_key=zlib.crc32(name.encode()) & 0x7FFF_FFFF,
            ordering_token=[],
        )
    return gathered.numpy()  # type: ignore[no-any-return]


def keeping_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, changed so that it keeps its errors in `_raised`.

    TensorFlow may lose the type of an exception that an operation raises.
    """

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except BaseException as error:
            _raised.append(error)
            raise

    return call


# The message about a worker whose connection has ended, or that exchanges something else.
_LOST = re.compile(r"worker \d+ is (lost|in another call): .*")


@contextlib.contextmanager
def call_of_all(placement: Placement, name: str) -> Iterator[None]:
    """Adds advice to the error of a call that another worker did not make, though all must make it.

    Args:
        placement: this process' place among the workers.
        name: the name of the method that is called inside the context.

    Raises:
        tf.errors.OpError: TensorFlow has aborted a collective, or the connection to a worker has
            ended. The error has the same type, and says what to do.
    """
    try:
        yield
    except tf.errors.OpError as error:
        advice = "on all workers alike, not only on the chief"
        is_aborted = "Collective ops is aborted" in error.message
        lost_worker = _LOST.match(error.message)
        if placement.workers == 1 or not (is_aborted or lost_worker) or advice in error.message:
            raise
        if lost_worker:
            raise type(error)(
                error.node_def,
                error.op,
                f"{lost_worker.group()}. If that worker has ended without an error, it did not "
                f"come to {name}(): call {name}() {advice}.",
            ) from None
        missing = sorted(
            {rank for exchange in last_exchanges(placement) for rank in exchange.missing}
        )
        several = "s" * (len(missing) > 1)
        waited = f" This worker waited for worker{several} {', '.join(map(str, missing))}."
        raise type(error)(
            error.node_def,
            error.op,
            f"another worker has ended, or did not come to {name}(). Call {name}() {advice}; if a "
            f"worker has failed, its own log says why.{waited if missing else ''} TensorFlow says: "
            f"{_tensorflows_words(error.message)}",
        ) from None


def _tensorflows_words(message: str) -> str:
    r"""Returns TensorFlow's reason for an aborted collective, with the tasks that it names.

    >>> _tensorflows_words("a\nCollective ops is aborted by: lost:\n/job:worker/task:1\nmore")
    'Collective ops is aborted by: lost: /job:worker/task:1'
    """
    reason, *details = message[message.index("Collective ops is aborted") :].splitlines()
    return " ".join([reason, *(line.strip() for line in details if line.startswith("/job:"))])


def _end_channels() -> None:
    """Closes the connections. The next call that all workers make connects them again."""
    for addresses, channel in list(_connected.items()):
        if channel is not None:
            channel.close()
            _ended[addresses] = channel
            del _connected[addresses]


@contextlib.contextmanager
def own_errors(placement: Placement) -> Iterator[None]:
    """Makes a call into TensorFlow raise the original error of an operation of `collectives`.

    If the call fails, the connections are closed. So workers that wait for a message of this worker
    fail, too. The next call connects again, since all workers make it.

    Raises:
        tf.errors.UnavailableError: another worker has ended, or such a call has failed on it.
    """
    if placement.addresses in _ended:
        _channel_between(placement)
        _ended.pop(placement.addresses, None)
    try:
        yield
    except (tf.errors.OpError, KeyboardInterrupt):
        _end_channels()
        if not _raised:
            raise
        first = _raised[0]
        if isinstance(first, ChannelError):
            raise tf.errors.UnavailableError(None, None, str(first)) from None
        raise first from None
    finally:
        _raised.clear()
