"""Reserves addresses for workers on this machine, and finds addresses at which nobody listens."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence

from tfmulti.cluster.listening import LOOPBACK

TIMED_OUT, REFUSED, NO_ROUTE, NO_NAME = "timed out", "refused", "no route", "no name"


@contextlib.contextmanager
def reserved(count: int, host: str = LOOPBACK) -> Iterator[list[str]]:
    """A context that reserves ports of this machine, and gives their `host:port` addresses.

    The sockets of the context are bound but do not listen. So the kernel does not give these ports
    to a program that asks for any free port. A server that names the port and sets SO_REUSEADDR, as
    gRPC does, can still listen at it.

    Args:
        count: the number of addresses.
        host: the name of this machine in the addresses.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # A host name may resolve to another interface, so all interfaces are reserved.
            sock.bind((host if host == LOOPBACK else "", 0))
        yield [f"{host}:{sock.getsockname()[1]}" for sock in sockets]


def why_silent(address: str, timeout_s: float = 0.2) -> str:
    """Returns why a connection to an address fails, or an empty text if a server listens there.

    Args:
        address: `host:port`, with an IPv6 address in brackets.
        timeout_s: the time limit for the connection.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return ""
    except OSError as error:
        return reason(error)


def reason(error: Exception) -> str:
    """Returns the kind of an error of a connection, or its message."""
    if isinstance(error, socket.gaierror):
        return NO_NAME
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return TIMED_OUT
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return NO_ROUTE
    return (getattr(error, "strerror", None) or str(error))[:200]


def silent(addresses: Sequence[str]) -> list[int]:
    """Returns the indices of the addresses at which nobody listens."""
    return [index for index, address in enumerate(addresses) if why_silent(address)]
