"""Accepts the connections of callers that belong to the job, and closes all others.

The launcher's master port, the port agreement of a scheduler's job and the doctor use it. Both
sides prove that they know the key of the job, in three lines of JSON:

    caller:    {"name": text, "nonce": hex}
    server:    {"nonce": hex, "proof": proof(key, "answers", name, both nonces)}
    caller:    {"proof": proof(key, "calls", name, both nonces)}

From then on each side signs its messages, with keys that are derived from the same values. The
three lines and the caller's first signed message are the handshake. A handshake has a time limit
and a limit for the length of its lines. At most `HANDSHAKES_AT_ONCE` handshakes run at the same
time: one more ends the oldest handshake. So silent callers do not block the port, because a
handshake within the job takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfmulti.cluster.job_secret import NONCE_BYTES, MessageAuthenticator, is_proof, nonce, proof
from tfmulti.cluster.messages import MOST_BYTES, TcpMessageConnection

# The limits of a handshake: its time, the length of a line, and how many run at once.
HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 65_536
HANDSHAKES_AT_ONCE = 64

# How long the server waits when the system has no resources for another connection.
ACCEPT_AGAIN_S = 0.2

# The longest name of a caller, as of a host name in DNS.
LONGEST_NAME = 255

# Each proof and each key names its side, so that a message cannot be sent back to its sender.
_ANSWERS, _CALLS = b"answers", b"calls"

OnCaller = Callable[[str, dict[str, Any], TcpMessageConnection], None]


class HandshakeError(ValueError):
    """The other side has not proved that it knows the key of the job."""


class HandshakeServer:
    """Accepts connections at a port in a thread of its own, until it is closed.

    Args:
        listener: the listening socket, which `close` closes.
        key: what only the processes of the job know.
        on_caller: takes the name, the first message and the connection of a caller that has proved
            that it knows the key. It runs in a thread of its own, and may take its time. If it
            raises an exception, the connection is closed.
        is_known: returns whether a caller may have this name.
        on_wrong_proof: takes the name of each caller that has sent a wrong proof.
        most_bytes: the greatest length of a message after the handshake.

    Raises:
        OSError: the system has no more threads.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        on_caller: OnCaller,
        *,
        is_known: Callable[[str], bool] = lambda name: True,
        on_wrong_proof: Callable[[str], None] = lambda name: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._listener, self._key, self._on_caller = listener, key, on_caller
        self._is_known, self._on_wrong_proof = is_known, on_wrong_proof
        self._most_bytes = most_bytes
        self._closed = False
        # The connections whose handshake runs, the oldest first. A dict keeps this order.
        self._handshakes: dict[TcpMessageConnection, None] = {}
        self._lock = threading.Lock()
        try:
            threading.Thread(target=self._accept, daemon=True).start()
        except RuntimeError:
            listener.close()
            raise OSError(errno.EAGAIN, "the system has no more threads") from None

    def close(self) -> None:
        """Closes the port, and the connections whose handshake still runs."""
        with self._lock:
            self._closed = True
            connections = list(self._handshakes)
            self._handshakes.clear()
        with contextlib.suppress(OSError):
            # This wakes the thread that waits in `accept`.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        """Accepts connections, and starts a thread for each."""
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
                self._start_handshake(TcpMessageConnection(sock, HANDSHAKE_BYTES))
            except OSError:
                if not self._closed:
                    # Too many files are open, or the caller has closed the connection again.
                    time.sleep(ACCEPT_AGAIN_S)

    def _start_handshake(self, connection: TcpMessageConnection) -> None:
        """Starts a thread for one new connection, or closes it if that is not possible."""
        self._take_slot(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            # The system has no more threads.
            self._free_slot(connection)
            connection.close()
            time.sleep(ACCEPT_AGAIN_S)

    def _serve(self, connection: TcpMessageConnection) -> None:
        """Handles one new connection, in a thread of its own."""
        try:
            connection.limit(HANDSHAKE_S)
            name = self._authenticated(connection)
            first = connection.expect()
            if not self._free_slot(connection):
                raise HandshakeError("a newer caller has ended the handshake")
            connection.limit(None)
            connection.most_bytes = self._most_bytes
            self._on_caller(name, first, connection)
        except Exception:
            # No message from an unknown sender may end the job.
            connection.close()
        finally:
            self._free_slot(connection)

    def _take_slot(self, connection: TcpMessageConnection) -> None:
        """Adds a handshake, and ends the oldest one if there are too many."""
        oldest = None
        with self._lock:
            if len(self._handshakes) >= HANDSHAKES_AT_ONCE:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
            self._handshakes[connection] = None
        if oldest is not None:
            oldest.close()

    def _free_slot(self, connection: TcpMessageConnection) -> bool:
        """Removes a handshake, and returns whether it had not been ended."""
        with self._lock:
            was_running = connection in self._handshakes
            self._handshakes.pop(connection, None)
            return was_running and not self._closed

    def _authenticated(self, connection: TcpMessageConnection) -> str:
        """Exchanges proofs with a caller, and returns its name.

        Raises:
            ValueError: the caller does not know the key, or has no name of the job.
        """
        first = connection.expect()
        name, caller_nonce = first.get("name"), _bytes_of(first, "nonce")
        if not isinstance(name, str) or len(caller_nonce) != NONCE_BYTES:
            raise HandshakeError("the caller does not belong to a job")
        if len(name) > LONGEST_NAME or not name.isprintable() or not self._is_known(name):
            raise HandshakeError("the job has no such name")
        own_nonce = nonce()
        exchanged = (name.encode(), caller_nonce, own_nonce)
        own_proof = proof(self._key, _ANSWERS, *exchanged)
        connection.send({"nonce": own_nonce.hex(), "proof": own_proof.hex()})
        caller_proof = _bytes_of(connection.receive() or {}, "proof")
        if not is_proof(caller_proof, self._key, _CALLS, *exchanged):
            self._on_wrong_proof(name)
            raise HandshakeError("the caller does not know the key")
        connection.authenticator = _authenticator(self._key, _ANSWERS, _CALLS, exchanged)
        return name


def authenticate(
    connection: TcpMessageConnection, key: bytes, name: str, most_bytes: int = MOST_BYTES
) -> None:
    """Exchanges proofs with the server of a connection, and signs the messages from then on.

    Args:
        connection: the connection.
        key: what only the processes of the job know.
        name: the name of this caller.
        most_bytes: the greatest length of a message after the handshake.

    Raises:
        HandshakeError: the other side does not know the key.
        OSError: the connection has ended, or nothing has come in time.
    """
    own_nonce = nonce()
    connection.most_bytes = HANDSHAKE_BYTES
    connection.limit(HANDSHAKE_S)
    connection.send({"name": name, "nonce": own_nonce.hex()})
    try:
        answer = connection.expect()
    except ValueError:
        answer = {}
    exchanged = (name.encode(), own_nonce, _bytes_of(answer, "nonce"))
    if not is_proof(_bytes_of(answer, "proof"), key, _ANSWERS, *exchanged):
        raise HandshakeError("another program or job answers there")
    connection.send({"proof": proof(key, _CALLS, *exchanged).hex()})
    connection.authenticator = _authenticator(key, _CALLS, _ANSWERS, exchanged)
    connection.most_bytes = most_bytes
    connection.limit(None)


def _authenticator(
    key: bytes, own: bytes, other: bytes, exchanged: tuple[bytes, ...]
) -> MessageAuthenticator:
    """Returns what signs the messages of the side `own`, and checks those of the side `other`."""
    return MessageAuthenticator(*(proof(key, b"seal", side, *exchanged) for side in (own, other)))


def _bytes_of(message: Mapping[str, Any], name: str) -> bytes:
    """Returns the bytes that a message holds in hexadecimal, or no bytes if it holds none."""
    try:
        return bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError):
        return b""
