"""Sends and receives JSON objects over a connection, one a line.

Once both sides have proved to each other that they belong to the same job (`handshake`), each line
begins with the signature of its message.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from tfmulti.cluster.job_secret import MessageAuthenticator
from tfmulti.cluster.listening import keep_alive
from tfmulti.config import json_values

# The greatest length of a message. It is large, because workers may write long lines.
MOST_BYTES = 1 << 24


class NotAMessage(ValueError):
    """A line is not a JSON object."""


class MessageConnection:
    """Sends and receives JSON objects, one a line. `send` may be called from any thread.

    With an `authenticator` each line begins with the signature of its message. A line with a wrong
    signature, or a line that is too long, ends the reception.

    Args:
        reader: where messages arrive.
        writer: where messages are sent.
        close: closes the connection.
        most_bytes: the greatest length of a received line.
    """

    def __init__(
        self,
        reader: IO[bytes],
        writer: IO[bytes],
        close: Callable[[], None] = lambda: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._reader, self._writer, self._close = reader, writer, close
        self.most_bytes = most_bytes
        self.authenticator: MessageAuthenticator | None = None
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message.

        Raises:
            OSError: the connection has ended.
        """
        data = json.dumps(message).encode()
        try:
            with self._lock:
                if self.authenticator is not None:
                    data = self.authenticator.signature_of(data) + b" " + data
                self._writer.write(data + b"\n")
                self._writer.flush()
        except ValueError as error:
            # The file was closed.
            raise OSError(str(error)) from None

    def expect(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            NotAMessage: the line is not a JSON object.
            ValueError: the line is too long, or has a wrong signature.
            OSError: the connection has ended, or the message has not come in time.
        """
        try:
            line = self._reader.readline(self.most_bytes + 1)
        except ValueError as error:
            # The file was closed.
            raise OSError(str(error)) from None
        if not line:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        if len(line) > self.most_bytes:
            raise ValueError(f"a message has more than {self.most_bytes} bytes")
        if self.authenticator is not None:
            signature, _, line = line.removesuffix(b"\n").partition(b" ")
            if not self.authenticator.is_valid(signature, line):
                raise ValueError("a message was changed on its way")
        try:
            message = json_values.parse(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NotAMessage("a line is not a JSON object")
        return message

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None when the reception has ended.

        The result is an empty dict if the line is not a JSON object. Over SSH the start file of the
        shell may print lines of its own.
        """
        try:
            return self.expect()
        except NotAMessage:
            return {}
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Closes the connection."""
        self._close()


class TcpMessageConnection(MessageConnection):
    """A connection over TCP, whose reception may have a time limit.

    Args:
        connection: the TCP connection.
        most_bytes: the greatest length of a received line.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        self._stream = _Stream(connection)
        reader, writer = io.BufferedReader(self._stream), cast(IO[bytes], self._stream)
        super().__init__(reader, writer, self._stream.end, most_bytes)

    def limit(self, seconds: float | None) -> None:
        """Limits the time in which all further messages must arrive.

        The limit is for all messages together, so a sender gains nothing by single bytes. It is
        also the limit for sending each message.

        Args:
            seconds: the limit, or None for no limit.
        """
        self._stream.limit(seconds)

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes that are no message, for `skip` on the other side."""
        self._stream.write(data)

    def skip(self, count: int) -> None:
        """Reads so many bytes and forgets them.

        Raises:
            OSError: the connection has ended, or the bytes have not come in time.
        """
        while count:
            received = len(self._reader.read(min(count, 1 << 16)))
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
            count -= received


class _Stream(io.RawIOBase):
    """The bytes of a socket, with a time at which the reception ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # The system gives the number of a closed socket to the next one, at which a waiting thread
        # would then read. So this file keeps the socket until no thread uses this stream.
        self._bytes = connection.makefile("rb", buffering=0)
        self._until_s: float | None = None

    def limit(self, seconds: float | None) -> None:
        self._until_s = None if seconds is None else time.monotonic() + seconds
        self._connection.settimeout(seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._until_s is not None:
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            self._connection.settimeout(left_s)
        return self._bytes.readinto(buffer)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._connection.sendall(data)
        return len(data)

    def end(self) -> None:
        """Ends the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
