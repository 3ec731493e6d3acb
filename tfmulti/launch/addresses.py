"""Reserves addresses for workers on this machine, and finds addresses at which nobody listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from tfmulti.cluster.listening import LOOPBACK


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


def answers(address: str, timeout_s: float = 0.2) -> bool:
    """Returns whether a server listens at an address.

    Args:
        address: `host:port`, with an IPv6 address in brackets.
        timeout_s: the time limit for the connection.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return True
    except OSError:
        return False


def silent(addresses: Sequence[str]) -> list[int]:
    """Returns the indices of the addresses at which nobody listens."""
    return [index for index, address in enumerate(addresses) if not answers(address)]
