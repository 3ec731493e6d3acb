"""Exchanges messages between the workers of a job, over a TCP connection between each two of them.

A message is a header and a payload. The header has two unsigned numbers of 64 bits in little-endian
order, the key and the length of the payload in bytes:

    key (8 bytes) | length (8 bytes) | payload (length bytes)

An exchange is one message from each worker to each other worker, all with the same key. `send`
begins the exchange and `receive` ends it. Many exchanges may be open at the same time. Exchanges
with the same key are told apart by their order. A message that arrives before this worker has begun
the exchange is kept until then.

The caller of `send` sends as many bytes as the connections take at once. The receiver thread sends
the rest. It also receives large messages, so these travel while the worker computes. The caller
of `receive` first polls the connections itself for a short time. Then it waits for the receiver
thread.

Only TCP acknowledges and repeats data: messages arrive whole and in order, or the connection
breaks. Then the exchanges that still need a message of that worker fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfmulti.data.buffers import aligned

THREAD = "tfmulti-channel"
# A waiting caller calls `check` this often.
CHECK_EVERY_S = 1.0
# A waiting caller polls the connections itself for this long, because waking the receiver thread
# takes longer (docs/measurements.md).
BUSY_POLL_S = 0.0003
# This many received bytes wake the receiver thread while no caller waits for it.
WAKE_BYTES = 65_536
# `last` returns up to this many exchanges that have ended.
MAX_RECORDS = 32
_HEADER = struct.Struct("<QQ")  # key, bytes


class ChannelError(ConnectionError):
    """A worker cannot be reached, or has ended."""


class ExchangeRecord(NamedTuple):
    """One exchange, for reports about a job that hangs.

    Attributes:
        key: the key of the exchange.
        began_s: when this worker began it, in seconds of `time.monotonic`.
        ended_s: when `receive` has returned or failed; None while the exchange is open.
        missing: the ranks of the workers whose messages have not arrived.
    """

    key: int
    began_s: float
    ended_s: float | None
    missing: tuple[int, ...]


class _Exchange:
    """The messages that this worker receives in one exchange, and the number of pending ones.

    The exchange ends when all its messages have been received and sent, or by an error.
    """

    def __init__(self, others: int) -> None:
        self.received: dict[int, np.ndarray] = {}
        self.began_s = time.monotonic()
        # How many messages are still to be sent or received, and the worker of the last one.
        self.pending_messages = 2 * others
        self.last: int | None = None
        self.error: ChannelError | None = None
        # The lock is held until the exchange ends.
        self.done = threading.Lock()
        self.done.acquire()

    def end(self, error: ChannelError | None = None) -> None:
        """Ends the exchange, unless it has ended."""
        if self.done.locked():
            self.error = error
            self.done.release()

    def count(self, rank: int) -> None:
        """Counts a message to or from the worker `rank`; the last one ends the exchange."""
        self.last = rank
        self.pending_messages -= 1
        if self.pending_messages == 0:
            self.end()

    def take(self, rank: int, payload: np.ndarray) -> None:
        """Takes the message of the worker `rank`."""
        self.received[rank] = payload
        self.count(rank)


class _Peer:
    """A connection to another worker, with its outgoing and incoming messages."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.lost: ChannelError | None = None
        # Held by the thread that sends: the caller of `send`, or the receiver thread.
        self.sending = threading.Lock()
        self.outgoing: deque[tuple[list[memoryview], _Exchange]] = deque()
        # Whether the connection takes no more bytes for the moment.
        self.is_full = False
        # Held by the thread that reads: the caller of `receive`, or the receiver thread.
        self.reading = threading.Lock()
        self.header = bytearray(_HEADER.size)
        # The key of the message whose payload is being received, or None during a header.
        self.key: int | None = None
        self.payload = np.empty(0, np.uint8)
        self.unread = memoryview(self.header)
        self.early_messages: dict[int, deque[np.ndarray]] = defaultdict(deque)


class Channel:
    """Exchanges messages with all other workers, until `close` is called or the process ends.

    Args:
        connections: the connection to each other worker by its rank, as `connect_workers` returns
            them.
        check: is called each second while an exchange waits. An exception that it raises ends the
            wait.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        # The bytes that were given to `send`, and those of them that are rows.
        self.sent_bytes = 0
        self.sent_row_bytes = 0
        # How long `receive` has waited, by the rank of the worker whose message was the last one.
        self.waited_s = np.zeros(len(connections) + 1)
        self._peers = [_Peer(rank, connection) for rank, connection in sorted(connections.items())]
        self._peer_of = {peer.connection.fileno(): peer for peer in self._peers}
        # Guards the exchanges and the early messages, which several threads change.
        self._lock = threading.Lock()
        self._open: dict[int, deque[_Exchange]] = defaultdict(deque)
        self._last: deque[ExchangeRecord] = deque(maxlen=MAX_RECORDS)
        self._epoll = select.epoll()
        for number in self._peer_of:
            self._epoll.register(number, select.EPOLLIN)
        # The number of callers that wait for the receiver thread.
        self._waiting = 0
        self._wake_for(WAKE_BYTES)
        # Wakes the receiver thread when the channel is closed.
        self._closing = os.eventfd(0)
        self._epoll.register(self._closing, select.EPOLLIN)
        # A forked child closes its copies of the sockets. Open copies would hide the end of this
        # process from the other workers.
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        threading.Thread(target=self._serve, name=THREAD, daemon=True).start()

    def send(self, key: int, values: Sequence[np.ndarray], *, are_rows: bool = False) -> None:
        """Begins an exchange, and returns before large messages have been sent.

        Args:
            key: a number of 64 bits, the same on all workers.
            values: the value for each other worker, in the order of their ranks. They are
                contiguous, and must not be changed before `receive` returns.
            are_rows: whether the values are rows of this worker, which are counted in
                `sent_row_bytes`.
        """
        exchange = _Exchange(len(self._peers))
        with self._lock:
            byte_count = sum(value.nbytes for value in values)
            self.sent_bytes += byte_count
            self.sent_row_bytes += byte_count if are_rows else 0
            self._open[key].append(exchange)
            for peer in self._peers:
                # A message that arrived before its worker was lost is still used.
                if peer.early_messages[key]:
                    exchange.take(peer.rank, peer.early_messages[key].popleft())
                elif peer.lost is not None:
                    exchange.end(peer.lost)
        for peer, value in zip(self._peers, values, strict=True):
            payload = value.reshape(-1).view(np.uint8).data
            header = memoryview(_HEADER.pack(key, len(payload)))
            with peer.sending:
                peer.outgoing.append(([header, payload], exchange))
                if not peer.is_full:
                    self._send_on(peer)

    def receive(self, key: int) -> list[np.ndarray]:
        """Returns the bytes that each other worker has sent with a key, as uint8 arrays.

        They are in the order of the ranks, and TensorFlow uses them without a copy (`aligned`).
        The method also waits until this worker's own messages of the exchange have been sent.

        Raises:
            ChannelError: a worker was lost before its message had arrived.
        """
        with self._lock:
            exchange = self._open[key][0]
        began_s = time.monotonic()
        try:
            if not self._poll(exchange):
                self._wait(exchange)
        finally:
            with self._lock:
                self._open[key].popleft()
                now_s = time.monotonic()
                if exchange.last is not None:
                    self.waited_s[exchange.last] += now_s - began_s
                missing = self._missing(exchange)
                self._last.append(ExchangeRecord(key, exchange.began_s, now_s, missing))
        if exchange.error is not None:
            raise exchange.error
        return [exchange.received[peer.rank] for peer in self._peers]

    def last(self) -> list[ExchangeRecord]:
        """Returns the records of the last exchanges that have ended, and then of all open ones.

        An exchange has failed if it has ended and still misses messages. Records outlive `close`.
        """
        with self._lock:
            exchanges = [(key, exchange) for key, queue in self._open.items() for exchange in queue]
            ended = list(self._last)
        return ended + [
            ExchangeRecord(key, exchange.began_s, None, self._missing(exchange))
            for key, exchange in exchanges
        ]

    def _missing(self, exchange: _Exchange) -> tuple[int, ...]:
        """Returns the ranks of the workers whose messages of an exchange have not come."""
        if len(exchange.received) == len(self._peers):
            return ()
        return tuple(peer.rank for peer in self._peers if peer.rank not in exchange.received)

    def _poll(self, exchange: _Exchange) -> bool:
        """Polls the connections for up to `BUSY_POLL_S`. Returns whether the exchange has ended.

        It stops if a message of this worker is still to be sent, since the receiver thread sends
        it.
        """
        until = time.perf_counter() + BUSY_POLL_S
        while not exchange.done.acquire(blocking=False):
            if any(peer.outgoing for peer in self._peers):
                return False
            # The time is checked before the reads, so each connection is read at least once.
            is_late = time.perf_counter() > until
            for peer in self._peers:
                if peer.rank not in exchange.received and peer.reading.acquire(blocking=False):
                    try:
                        self._read(peer)
                    finally:
                        peer.reading.release()
            if is_late:
                return exchange.done.acquire(blocking=False)
            os.sched_yield()
        return True

    def _wait(self, exchange: _Exchange) -> None:
        """Waits until the receiver thread ends the exchange, and calls `check` each second."""
        with self._lock:
            self._waiting += 1
            self._wake_for(1)
        try:
            while not exchange.done.acquire(timeout=CHECK_EVERY_S):
                try:
                    self._check()
                except Exception:
                    # The lost worker may have sent its message before, but it is not read yet.
                    if not exchange.done.acquire(timeout=CHECK_EVERY_S):
                        raise
                    return
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._wake_for(WAKE_BYTES)

    def _wake_for(self, count: int) -> None:
        """Sets how many received bytes of a connection wake the receiver thread (`SO_RCVLOWAT`).

        A connection that has ended wakes it with fewer bytes, too.
        """
        for peer in self._peers:
            if peer.lost is None:
                with contextlib.suppress(OSError):
                    peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def close(self) -> None:
        """Closes every connection.

        Exchanges that still need a message fail with `ChannelError`, here and on all other workers.
        It is for use after an error. Some open exchanges may then never be received, and later
        exchanges with the same keys would get their messages.
        """
        for peer in self._peers:
            self._lose(peer, OSError("an error ended the exchanges with it"))
            with peer.sending:
                self._send_on(peer)
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._closing >= 0:
                os.eventfd_write(self._closing, 1)

    def _serve(self) -> None:
        """Sends and receives until all connections are lost. The receiver thread runs it."""
        while any(peer.lost is None for peer in self._peers):
            for descriptor, event in self._epoll.poll():
                if descriptor == self._closing:
                    continue
                peer = self._peer_of[descriptor]
                if event & select.EPOLLOUT:
                    with peer.sending:
                        self._send_on(peer)
                if event & ~select.EPOLLOUT:
                    with peer.reading:
                        self._read(peer)
        with self._lock:
            os.close(self._closing)
            self._closing = -1
        self._epoll.close()
        self.forget()

    def forget(self) -> None:
        """Closes this process' sockets without ending the connections.

        Another process may hold the same connections open.
        """
        for peer in self._peers:
            peer.connection.close()

    def _send_on(self, peer: _Peer) -> None:
        """Sends as many bytes as a connection takes now. The caller holds `peer.sending`.

        The receiver thread sends the rest as soon as the connection takes more.
        """
        is_full = False
        try:
            while peer.outgoing:
                parts, exchange = peer.outgoing[0]
                if peer.lost is None:
                    _drop(parts, peer.connection.sendmsg(parts))
                if not parts or peer.lost is not None:
                    peer.outgoing.popleft()
                    with self._lock:
                        exchange.count(peer.rank)
        except BlockingIOError:
            is_full = True
        except OSError as error:
            self._lose(peer, error)
            self._send_on(peer)
            return
        if is_full != peer.is_full:
            peer.is_full = is_full
            wanted = select.EPOLLIN | (select.EPOLLOUT if is_full else 0)
            with self._lock:
                if peer.lost is None:
                    self._epoll.modify(peer.connection, wanted)

    def _read(self, peer: _Peer) -> None:
        """Receives what has arrived on a connection. The caller holds `peer.reading`."""
        if peer.lost is not None:
            return
        try:
            while True:
                while len(peer.unread):
                    count = peer.connection.recv_into(peer.unread)
                    if not count:
                        raise ConnectionResetError("it has closed the connection")
                    peer.unread = peer.unread[count:]
                self._advance(peer)
        except BlockingIOError:
            return
        # A waiting caller learns of the error only from its exchange, which `_lose` ends.
        except Exception as error:
            self._lose(peer, error)
            with peer.sending:
                self._send_on(peer)

    def _advance(self, peer: _Peer) -> None:
        """Handles a header or a payload that was received completely."""
        if peer.key is None:
            peer.key, count = _HEADER.unpack(peer.header)
            peer.payload = aligned(count)
            peer.unread = peer.payload.data
            return
        with self._lock:
            waiting = (e for e in self._open[peer.key] if peer.rank not in e.received)
            exchange = next(waiting, None)
            if exchange is None:
                peer.early_messages[peer.key].append(peer.payload)
            else:
                exchange.take(peer.rank, peer.payload)
        peer.key, peer.unread = None, memoryview(peer.header)

    def _lose(self, peer: _Peer, error: Exception) -> None:
        """Marks a worker as lost; exchanges that still need its message end with the error."""
        with self._lock:
            if peer.lost is not None:
                return
            peer.lost = ChannelError(f"worker {peer.rank} is lost: {error}")
            # The connection may have been closed already.
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(peer.connection)
            for exchange in (e for queue in self._open.values() for e in queue):
                if peer.rank not in exchange.received:
                    exchange.end(peer.lost)


def _forget(channel: weakref.ref[Channel]) -> None:
    """Closes a channel's sockets in a forked child, if the channel still exists."""
    existing = channel()
    if existing is not None:
        existing.forget()


def _drop(parts: list[memoryview], sent: int) -> None:
    """Removes as many bytes as were sent from the front of the parts."""
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][sent:]
