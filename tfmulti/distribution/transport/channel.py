"""Messages between the workers of a job: a TCP connection from each to each.

A message is a key, a length and bytes. What one call of `send` gives to the others, and what they
give with the same key, is an exchange; any number of them may be under way, and one that others
send before this worker does waits for it. A thread receives what is large, so that it travels while
the worker computes; what a connection takes at once is sent by the caller, and what is there, or
comes soon, is read by who waits for it.

TCP's own limits hold: messages arrive whole and in order, or the connection breaks.
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

import numpy as np

from tfmulti.data.loader import aligned

THREAD = "tfmulti-links"
CHECK_EVERY_S = 1.0  # while an exchange waits
SOON_S = 0.0003  # within which who waits reads by itself: waking a thread takes longer
ENOUGH_BYTES = 65_536  # that have come wake the thread, where nobody waits
_HEADER = struct.Struct("<QQ")  # key, bytes


class ChannelError(ConnectionError):
    """A worker cannot be reached, or has ended."""


class _Exchange:
    """What is to come from the others and what is to go to them, under one key."""

    def __init__(self, others: int) -> None:
        self.received: dict[int, np.ndarray] = {}
        self.left = 2 * others  # messages to send and to receive
        self.error: ChannelError | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def end(self, error: ChannelError | None = None) -> None:
        if self.done.locked():
            self.error = error
            self.done.release()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.end()

    def take(self, rank: int, payload: np.ndarray) -> None:
        self.received[rank] = payload
        self.count()


class _Peer:
    """A connection, what waits to be sent on it, and what is being received."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.link = rank, link
        self.lost: ChannelError | None = None
        # Whoever sends holds it: who begins an exchange, or the thread.
        self.sending = threading.Lock()
        self.outgoing: deque[tuple[list[memoryview], _Exchange]] = deque()
        self.is_full = False  # the connection takes no more for now
        # Whoever reads holds it: who waits, or the thread.
        self.reading = threading.Lock()
        self.header = bytearray(_HEADER.size)
        self.key: int | None = None  # of the message whose bytes are being received
        self.payload = np.empty(0, np.uint8)
        self.rest = memoryview(self.header)
        self.early: dict[int, deque[np.ndarray]] = defaultdict(deque)


class Channel:
    """Exchanges messages with all other workers, as long as the process lives or to `close`.

    Args:
        connections: to each other worker, by its rank, as `join` returns them.
        check: called each second while an exchange waits; what it raises ends the wait.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self.sent_bytes = 0  # what was given to `send`, to all others together
        self.sent_row_bytes = 0  # of these what was said to be rows
        self._peers = [_Peer(rank, link) for rank, link in sorted(connections.items())]
        self._at = {peer.link.fileno(): peer for peer in self._peers}
        self._lock = threading.Lock()  # of what both threads write: exchanges, and what was early
        self._open: dict[int, deque[_Exchange]] = defaultdict(deque)
        self._epoll = select.epoll()
        for number in self._at:
            self._epoll.register(number, select.EPOLLIN)
        self._waiting = 0  # who wants the thread to read all that comes
        self._wake_for(ENOUGH_BYTES)
        self._closing = os.eventfd(0)  # wakes the thread
        self._epoll.register(self._closing, select.EPOLLIN)
        # What a child of this process holds open would keep the others from hearing of its end.
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        threading.Thread(target=self._serve, name=THREAD, daemon=True).start()

    def send(self, key: int, values: Sequence[np.ndarray], *, are_rows: bool = False) -> None:
        """Begins an exchange; returns before what is large has been sent.

        Exchanges of one key are told from each other by their order.

        Args:
            key: of 64 bits, the same on all workers.
            values: what goes to each other worker, in the order of their ranks: contiguous, and
                not to be changed before `receive` returns.
            are_rows: they are all rows of this worker, and counted as such.
        """
        exchange = _Exchange(len(self._peers))
        with self._lock:
            given = sum(value.nbytes for value in values)
            self.sent_bytes += given
            self.sent_row_bytes += given if are_rows else 0
            self._open[key].append(exchange)
            for peer in self._peers:
                if peer.early[key]:
                    exchange.take(peer.rank, peer.early[key].popleft())
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
        """Returns the bytes that each other worker has sent with a key, as uint8, in their order.

        The memory is aligned as TensorFlow likes it.

        Raises:
            LinkError: a worker has ended before it sent them.
        """
        with self._lock:
            exchange = self._open[key][0]
        try:
            if not self._read_soon(exchange):
                self._wait(exchange)
        finally:
            with self._lock:
                self._open[key].popleft()
        if exchange.error is not None:
            raise exchange.error
        return [exchange.received[peer.rank] for peer in self._peers]

    def _read_soon(self, exchange: _Exchange) -> bool:
        """Reads what is there and what comes soon; returns whether the exchange has ended.

        Not where something large is still being sent, which the thread does.
        """
        until = time.perf_counter() + SOON_S
        while not exchange.done.acquire(blocking=False):
            if any(peer.outgoing for peer in self._peers):
                return False
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
        with self._lock:
            self._waiting += 1
            self._wake_for(1)
        try:
            while not exchange.done.acquire(timeout=CHECK_EVERY_S):
                self._check()
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._wake_for(ENOUGH_BYTES)

    def _wake_for(self, count: int) -> None:
        """Has the thread woken where so many bytes have come; by less, only of what ended."""
        for peer in self._peers:
            if peer.lost is None:
                with contextlib.suppress(OSError):
                    peer.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def close(self) -> None:
        """Ends all connections: those who wait here or at the others, and who comes, are told.

        After an error, when exchanges may have been begun that nobody receives any more: the next
        ones of their keys would get what is theirs.
        """
        for peer in self._peers:
            self._lose(peer, OSError("an error ended the exchanges with it"))
            with peer.sending:
                self._send_on(peer)
            with contextlib.suppress(OSError):
                peer.link.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._closing >= 0:
                os.eventfd_write(self._closing, 1)

    def _serve(self) -> None:
        while any(peer.lost is None for peer in self._peers):
            for number, event in self._epoll.poll():
                if number == self._closing:
                    continue
                peer = self._at[number]
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
        """Closes this process' end of all connections, without a word to the others."""
        for peer in self._peers:
            peer.link.close()

    def _send_on(self, peer: _Peer) -> None:
        """Sends what the connection takes now; the thread goes on where it takes no more."""
        is_full = False
        try:
            while peer.outgoing:
                parts, exchange = peer.outgoing[0]
                if peer.lost is None:
                    _drop(parts, peer.link.sendmsg(parts))
                if not parts or peer.lost is not None:
                    peer.outgoing.popleft()
                    with self._lock:
                        exchange.count()
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
                    self._epoll.modify(peer.link, wanted)

    def _read(self, peer: _Peer) -> None:
        if peer.lost is not None:
            return
        try:
            while True:
                while len(peer.rest):
                    count = peer.link.recv_into(peer.rest)
                    if not count:
                        raise ConnectionResetError("it has closed the connection")
                    peer.rest = peer.rest[count:]
                self._advance(peer)
        except BlockingIOError:
            return
        except Exception as error:  # nothing else would tell those who wait
            self._lose(peer, error)
            with peer.sending:
                self._send_on(peer)

    def _advance(self, peer: _Peer) -> None:
        """Takes what was received whole: a header, or the bytes that it told of."""
        if peer.key is None:
            peer.key, count = _HEADER.unpack(peer.header)
            peer.payload = aligned(count)
            peer.rest = peer.payload.data
            return
        with self._lock:
            waiting = (e for e in self._open[peer.key] if peer.rank not in e.received)
            exchange = next(waiting, None)
            if exchange is None:
                peer.early[peer.key].append(peer.payload)
            else:
                exchange.take(peer.rank, peer.payload)
        peer.key, peer.rest = None, memoryview(peer.header)

    def _lose(self, peer: _Peer, error: Exception) -> None:
        """Ends the exchanges that a worker has a part in: it has ended, or cannot be reached."""
        with self._lock:
            if peer.lost is not None:
                return
            peer.lost = ChannelError(f"worker {peer.rank} is lost: {error}")
            with contextlib.suppress(OSError, ValueError):  # it may have been closed
                self._epoll.unregister(peer.link)
            for exchange in (e for each in self._open.values() for e in each):
                if peer.rank not in exchange.received:
                    exchange.end(peer.lost)


def _forget(links: weakref.ref[Channel]) -> None:
    found = links()
    if found is not None:
        found.forget()


def _drop(parts: list[memoryview], sent: int) -> None:
    """Takes away as many bytes as were sent, and parts that were sent whole."""
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][sent:]
