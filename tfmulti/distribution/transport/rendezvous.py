"""Connects every worker of a job with every other one over TCP, for `channel`.

Each worker listens at an address. It calls the workers of lower ranks, and answers those of higher
ranks. The caller and the answerer tell their ranks, and prove to each other that they know the
job's key. The key itself is never sent. The messages of a connection are, in this order:

    caller:    hello of the caller: random bytes, rank
    answerer:  hello of the answerer, and proof(key, "answers", both hellos)
    caller:    proof(key, "calls", both hellos)

`tfmulti.cluster.job_secret` makes and checks the proofs. Each call is answered in a thread of its
own, so a stranger that sends nothing does not delay the workers.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from tfmulti.cluster.job_secret import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from tfmulti.cluster.listening import keep_alive
from tfmulti.distribution.transport.channel import ChannelError

_HELLO = struct.Struct(f"<{NONCE_BYTES}sI")  # random bytes, rank
# A caller must prove within this time that it is a worker of the job.
_STRANGER_S = 3.0
# This many calls are answered at the same time. Others are refused.
_ANSWERED_AT_ONCE = 64
# How often the worker checks which callers have proved that they are workers.
_POLL_S = 0.1


def connect_workers(
    listener: socket.socket,
    rank: int,
    addresses: Sequence[tuple[str, int]],
    key: bytes,
    timeout_s: float = 10.0,
) -> dict[int, socket.socket]:
    """Returns a connection to each other worker, by its rank. All workers call it.

    Args:
        listener: the socket on which this worker listens; it is closed.
        rank: this worker's rank.
        addresses: the host and port of each worker's listener, in the order of their ranks.
        key: bytes that only the workers of the job know.
        timeout_s: the time limit.

    Raises:
        ChannelError: a worker could not be reached in time, or another program answers at its
            address.
    """
    deadline_s = time.monotonic() + timeout_s
    connections: dict[int, socket.socket] = {}
    try:
        with listener:
            for other in range(rank):
                connections[other] = _call(other, addresses[other], rank, key, deadline_s)
            later = set(range(rank + 1, len(addresses)))
            connections |= _answer_all(listener, rank, later, key, deadline_s)
    except OSError as error:
        for connection in connections.values():
            connection.close()
        raise ChannelError(f"worker {rank} does not reach all others: {error}") from error
    for connection in connections.values():
        _set_up(connection)
    return connections


def _set_up(connection: socket.socket) -> None:
    """Makes a connection ready for the channel: no delays, probes when idle, no blocking."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    connection.setblocking(False)


def _time_left(deadline_s: float) -> float:
    """Returns the seconds until a deadline, or raises TimeoutError if it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _call(
    other: int, address: tuple[str, int], rank: int, key: bytes, deadline_s: float
) -> socket.socket:
    """Returns the connection to a worker of a lower rank, which has proved that it has the key."""
    connection = socket.create_connection(address, timeout=_time_left(deadline_s))
    ours = _HELLO.pack(nonce(), rank)
    connection.sendall(ours)
    try:
        theirs = _receive(connection, _HELLO.size, deadline_s)
        its_proof = _receive(connection, PROOF_BYTES, deadline_s)
    except ConnectionError:
        theirs = its_proof = b""
    if not is_proof(its_proof, key, b"answers", ours, theirs) or _HELLO.unpack(theirs)[1] != other:
        connection.close()
        raise ChannelError(
            f"another program answers at {address[0]}:{address[1]}, or one of a job with another "
            "secret"
        )
    connection.sendall(proof(key, b"calls", ours, theirs))
    return connection


def _answer_all(
    listener: socket.socket, rank: int, ranks: set[int], key: bytes, deadline_s: float
) -> dict[int, socket.socket]:
    """Returns a connection from each of these ranks, and turns away strangers."""
    answered: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
    slots = threading.BoundedSemaphore(_ANSWERED_AT_ONCE)
    connections: dict[int, socket.socket] = {}

    def answer(connection: socket.socket) -> None:
        caller = _answer(connection, rank, ranks, key, deadline_s)
        if caller is not None:
            answered.put((caller, connection))
        slots.release()

    while ranks - connections.keys():
        listener.settimeout(min(_POLL_S, _time_left(deadline_s)))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            pass
        except OSError:
            # Too many files are open, or the caller has closed the connection.
            time.sleep(_POLL_S)
        else:
            if slots.acquire(blocking=False):
                _start(answer, connection, slots)
            else:
                connection.close()
        while not answered.empty():
            caller, connection = answered.get()
            connections[caller] = connection
    return connections


def _start(
    answer: Callable[[socket.socket], None], connection: socket.socket, slots: threading.Semaphore
) -> None:
    """Answers a call in a new thread, or refuses it if the system allows no more threads."""
    try:
        threading.Thread(target=answer, args=(connection,), daemon=True).start()
    except RuntimeError:
        slots.release()
        connection.close()
        time.sleep(_POLL_S)


def _answer(
    connection: socket.socket, rank: int, ranks: set[int], key: bytes, deadline_s: float
) -> int | None:
    """Returns the rank of a caller, or closes the connection of a stranger and returns None."""
    deadline_s = min(deadline_s, time.monotonic() + _STRANGER_S)
    with contextlib.suppress(OSError):
        theirs = _receive(connection, _HELLO.size, deadline_s)
        _, caller = _HELLO.unpack(theirs)
        if caller in ranks:
            ours = _HELLO.pack(nonce(), rank)
            connection.sendall(ours + proof(key, b"answers", theirs, ours))
            its_proof = _receive(connection, PROOF_BYTES, deadline_s)
            if is_proof(its_proof, key, b"calls", theirs, ours):
                return int(caller)
    connection.close()
    return None


def _receive(connection: socket.socket, count: int, deadline_s: float) -> bytes:
    """Returns `count` received bytes."""
    received = b""
    while len(received) < count:
        connection.settimeout(_time_left(deadline_s))
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ChannelError("the connection was closed")
        received += chunk
    return received
