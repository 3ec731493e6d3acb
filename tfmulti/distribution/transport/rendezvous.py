"""Connects every worker of a job with every other one over TCP (`channel` uses the connections).

Each worker listens at an address. It calls the workers of lower ranks, and answers those of higher
ranks. The caller and the answerer tell their ranks, and prove to each other that they know the
job's key. The key itself is never sent. The messages of a connection are, in this order:

    caller:    hello of the caller: random bytes, rank
    answerer:  hello of the answerer, and proof(key, "answers", both hellos)
    caller:    proof(key, "calls", both hellos)

`tfmulti.cluster.job_secret` makes and checks the proofs. Each call is answered in a thread of its
own, so a stranger that says nothing does not hold up the workers.
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
# A caller must prove in this time that it is a worker of the job.
_STRANGER_S = 3.0
# So many calls are answered at the same time; others are refused.
_ANSWERED_AT_ONCE = 64
# So often the worker looks which callers have proved to be workers.
_LOOK_S = 0.1


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
        key: bytes that all workers of the job know, and nobody else.
        timeout_s: the seconds after which it gives up.

    Raises:
        ChannelError: a worker could not be reached in time, or another program answers at its
            address.
    """
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    try:
        with listener:
            for other in range(rank):
                found[other] = _call(other, addresses[other], rank, key, deadline_s)
            later = set(range(rank + 1, len(addresses)))
            found |= _answer_all(listener, rank, later, key, deadline_s)
    except OSError as error:
        for connection in found.values():
            connection.close()
        raise ChannelError(f"worker {rank} does not reach all others: {error}") from error
    for connection in found.values():
        _set_up(connection)
    return found


def _set_up(connection: socket.socket) -> None:
    """Makes a connection ready for the channel: no delays, probes when idle, no blocking."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    connection.setblocking(False)


def _left(deadline_s: float) -> float:
    """Returns the seconds until a deadline; raises TimeoutError if it is over."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _call(
    other: int, address: tuple[str, int], rank: int, key: bytes, deadline_s: float
) -> socket.socket:
    """Returns the connection to a worker of a lower rank, which has proved that it has the key."""
    connection = socket.create_connection(address, timeout=_left(deadline_s))
    ours = _HELLO.pack(nonce(), rank)
    connection.sendall(ours)
    try:
        theirs = _exactly(connection, _HELLO.size, deadline_s)
        its_proof = _exactly(connection, PROOF_BYTES, deadline_s)
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
    """Returns a connection from each of these ranks, and answers strangers beside them."""
    answered: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
    places = threading.BoundedSemaphore(_ANSWERED_AT_ONCE)
    found: dict[int, socket.socket] = {}

    def answer(connection: socket.socket) -> None:
        who = _answer(connection, rank, ranks, key, deadline_s)
        if who is not None:
            answered.put((who, connection))
        places.release()

    while ranks - found.keys():
        listener.settimeout(min(_LOOK_S, _left(deadline_s)))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            pass
        except OSError:
            # Too many files are open, or the caller has gone.
            time.sleep(_LOOK_S)
        else:
            if places.acquire(blocking=False):
                _start(answer, connection, places)
            else:
                connection.close()
        while not answered.empty():
            who, connection = answered.get()
            found[who] = connection
    return found


def _start(
    answer: Callable[[socket.socket], None], connection: socket.socket, places: threading.Semaphore
) -> None:
    """Answers a call in a thread of its own, or refuses it if the system has none left."""
    try:
        threading.Thread(target=answer, args=(connection,), daemon=True).start()
    except RuntimeError:
        # The system has no more threads.
        places.release()
        connection.close()
        time.sleep(_LOOK_S)


def _answer(
    connection: socket.socket, rank: int, ranks: set[int], key: bytes, deadline_s: float
) -> int | None:
    """Returns the rank of a caller; None if it is a stranger, whose connection it closes."""
    deadline_s = min(deadline_s, time.monotonic() + _STRANGER_S)
    with contextlib.suppress(OSError):
        theirs = _exactly(connection, _HELLO.size, deadline_s)
        _, who = _HELLO.unpack(theirs)
        if who in ranks:
            ours = _HELLO.pack(nonce(), rank)
            connection.sendall(ours + proof(key, b"answers", theirs, ours))
            its_proof = _exactly(connection, PROOF_BYTES, deadline_s)
            if is_proof(its_proof, key, b"calls", theirs, ours):
                return int(who)
    connection.close()
    return None


def _exactly(connection: socket.socket, count: int, deadline_s: float) -> bytes:
    """Returns `count` received bytes."""
    found = b""
    while len(found) < count:
        connection.settimeout(_left(deadline_s))
        more = connection.recv(count - len(found))
        if not more:
            raise ChannelError("the connection was closed")
        found += more
    return found
