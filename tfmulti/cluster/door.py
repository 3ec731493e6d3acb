"""Accepts the connections of callers that belong to the job, and closes all others.

The launcher's master port, the port agreement of a scheduler's job and the doctor use it. Both
sides prove that they know the key of the job, in three lines of JSON:

    caller:    {"name": text, "nonce": hex}
    answerer:  {"nonce": hex, "proof": proof(key, "answers", name, both nonces)}
    caller:    {"proof": proof(key, "calls", name, both nonces)}

From then on each side signs its messages, with keys that are derived from the same values. The
three lines and the caller's first signed message are the greeting. A greeting has a time limit and
a limit for the length of its lines. At most `GREETED_AT_ONCE` greetings run at the same time: one
more ends the oldest greeting. So silent callers do not block the port, because a greeting of the
job takes milliseconds.
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

# The limits of a greeting: its time, the length of a line, and how many there are at once.
GREETING_S = 5.0
GREETING_BYTES = 65_536
GREETED_AT_ONCE = 64

# How long the door waits when the system has no resources for another connection.
ACCEPT_AGAIN_S = 0.2

# The greatest length of a name, as of a host name in DNS.
LONGEST_NAME = 255

# Each proof and each key names its side, so that a message cannot be sent back to its sender.
_ANSWERS, _CALLS = b"answers", b"calls"

Enter = Callable[[str, dict[str, Any], TcpMessageConnection], None]


class Stranger(ValueError):
    """The other side does not know the key of the job."""


class Door:
    """Accepts connections at a port in a thread of its own, until it is closed.

    Args:
        server: the listening socket, which `close` closes.
        key: what only the processes of the job know.
        enter: takes the name, the first message and the connection of a caller that has proved
            that it knows the key. It runs in a thread of its own, and may take its time. If it
            raises an exception, the connection is closed.
        knows: returns whether a caller may have this name.
        refuse: is called with the name of each caller that has sent a wrong proof.
        most_bytes: the greatest length of a message after the greeting.

    Raises:
        OSError: the system has no more threads.
    """

    def __init__(
        self,
        server: socket.socket,
        key: bytes,
        enter: Enter,
        *,
        knows: Callable[[str], bool] = lambda name: True,
        refuse: Callable[[str], None] = lambda name: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._server, self._key, self._enter = server, key, enter
        self._knows, self._refuse, self._most_bytes = knows, refuse, most_bytes
        self._closed = False
        # The connections that are greeted, the oldest first.
        self._greeted: dict[TcpMessageConnection, bool] = {}
        self._lock = threading.Lock()
        try:
            threading.Thread(target=self._accept, daemon=True).start()
        except RuntimeError:
            server.close()
            raise OSError(errno.EAGAIN, "the system has no more threads") from None

    def close(self) -> None:
        """Closes the port, and the connections that are still greeted."""
        with self._lock:
            self._closed = True
            greeted = list(self._greeted)
            self._greeted.clear()
        with contextlib.suppress(OSError):
            # This wakes the thread that waits in `accept`.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in greeted:
            connection.close()

    def _accept(self) -> None:
        """Accepts connections, and starts a thread for each."""
        while not self._closed:
            try:
                self._begin(TcpMessageConnection(self._server.accept()[0], GREETING_BYTES))
            except OSError:
                if not self._closed:
                    # Too many files are open, or the caller has closed the connection again.
                    time.sleep(ACCEPT_AGAIN_S)

    def _begin(self, connection: TcpMessageConnection) -> None:
        """Starts a thread for one new connection, or closes it if that is not possible."""
        self._take_slot(connection)
        try:
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        except RuntimeError:
            # The system has no more threads.
            self._free_slot(connection)
            connection.close()
            time.sleep(ACCEPT_AGAIN_S)

    def _greet(self, connection: TcpMessageConnection) -> None:
        """Handles one new connection, in a thread of its own."""
        try:
            connection.limit(GREETING_S)
            name = self._proven(connection)
            first = connection.expect()
            if not self._free_slot(connection):
                raise Stranger("the greeting was ended")
            connection.limit(None)
            connection.most_bytes = self._most_bytes
            self._enter(name, first, connection)
        except Exception:
            # No message from an unknown sender may end the job.
            connection.close()
        finally:
            self._free_slot(connection)

    def _take_slot(self, connection: TcpMessageConnection) -> None:
        """Adds a greeting, and ends the oldest one if there are too many."""
        oldest = None
        with self._lock:
            if len(self._greeted) >= GREETED_AT_ONCE:
                oldest = next(iter(self._greeted))
                del self._greeted[oldest]
            self._greeted[connection] = True
        if oldest is not None:
            oldest.close()

    def _free_slot(self, connection: TcpMessageConnection) -> bool:
        """Removes a greeting, and returns whether it had not been ended."""
        with self._lock:
            return self._greeted.pop(connection, False) and not self._closed

    def _proven(self, connection: TcpMessageConnection) -> str:
        """Returns the name of the caller.

        Raises:
            ValueError: the caller does not know the key, or has no name of the job.
        """
        greeting = connection.expect()
        name, theirs = greeting.get("name"), _bytes_of(greeting, "nonce")
        if not isinstance(name, str) or len(theirs) != NONCE_BYTES:
            raise Stranger("the caller does not belong to a job")
        if len(name) > LONGEST_NAME or not name.isprintable() or not self._knows(name):
            raise Stranger("the job has no such name")
        ours = nonce()
        exchanged = (name.encode(), theirs, ours)
        connection.send(
            {"nonce": ours.hex(), "proof": proof(self._key, _ANSWERS, *exchanged).hex()}
        )
        if not is_proof(
            _bytes_of(connection.receive() or {}, "proof"), self._key, _CALLS, *exchanged
        ):
            self._refuse(name)
            raise Stranger("the caller does not know the key")
        connection.seal = _authenticator(self._key, _ANSWERS, _CALLS, exchanged)
        return name


def prove(
    connection: TcpMessageConnection, key: bytes, name: str, most_bytes: int = MOST_BYTES
) -> None:
    """Exchanges proofs with the side that was called, and signs the messages from then on.

    Args:
        connection: the connection.
        key: what only the processes of the job know.
        name: the name of this caller.
        most_bytes: the greatest length of a message after the greeting.

    Raises:
        Stranger: the other side does not know the key.
        OSError: the connection has ended, or nothing has come in time.
    """
    ours = nonce()
    connection.most_bytes = GREETING_BYTES
    connection.limit(GREETING_S)
    connection.send({"name": name, "nonce": ours.hex()})
    try:
        answer = connection.expect()
    except ValueError:
        answer = {}
    exchanged = (name.encode(), ours, _bytes_of(answer, "nonce"))
    if not is_proof(_bytes_of(answer, "proof"), key, _ANSWERS, *exchanged):
        raise Stranger("another program or job answers there")
    connection.send({"proof": proof(key, _CALLS, *exchanged).hex()})
    connection.seal = _authenticator(key, _CALLS, _ANSWERS, exchanged)
    connection.most_bytes = most_bytes
    connection.limit(None)


def _authenticator(
    key: bytes, own: bytes, other: bytes, exchanged: tuple[bytes, ...]
) -> MessageAuthenticator:
    """Returns what signs the messages of one side, and checks those of the other side."""
    return MessageAuthenticator(*(proof(key, b"seal", side, *exchanged) for side in (own, other)))


def _bytes_of(message: Mapping[str, Any], name: str) -> bytes:
    """Returns the bytes that a message holds in hexadecimal, or no bytes if it holds none."""
    try:
        return bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError):
        return b""
