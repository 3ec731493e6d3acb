"""Addresses for workers on this machine that nobody else can get in between."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved(count: int, host: str = LOOPBACK) -> Iterator[list[str]]:
    """Gives `host:port` addresses of this machine that stay this job's while the context lasts.

    The ports are bound here but do not listen: the kernel gives them to no one who asks for
    any free port, while a server that names one (with SO_REUSEADDR, as gRPC does) may listen.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host if host == LOOPBACK else "", 0))  # a name may be another interface's
        yield [f"{host}:{held.getsockname()[1]}" for held in sockets]


def answers(address: str, timeout_s: float = 0.2) -> bool:
    """Returns whether somebody listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return True
    except OSError:
        return False


def silent(addresses: Sequence[str]) -> list[int]:
    """Returns the places of the addresses at which nobody listens."""
    return [place for place, address in enumerate(addresses) if not answers(address)]
