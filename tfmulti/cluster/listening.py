"""At which of this machine's addresses a job listens: no more than its workers need."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

LOOPBACK = "127.0.0.1"
_KEEPALIVE = (60, 15, 4)  # seconds to the first probe and between probes, and how many


def listen(own: str, hosts: Sequence[str], port: int = 0) -> socket.socket:
    """Returns a socket that listens for the machines of a job.

    On loopback if all hosts are this one by a loopback address; else at the address that `own`
    means; on all interfaces only where that is none of this machine's, or its own for itself alone
    while the others reach it by another (as Debian's 127.0.1.1).

    Args:
        own: the name or address under which the others reach this machine, without brackets.
        hosts: those of all machines of the job.

    Raises:
        OSError: the port is in use.
    """
    alone = all(host == own for host in hosts)
    for family, address in _addresses(own):
        if _is_loopback(address[0]) and not alone and not all(map(_names_loopback, hosts)):
            continue
        try:
            return socket.create_server((address[0], port, *address[2:]), family=family)
        except OSError:
            if can_bind(family, address):
                raise
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_here(host: str) -> bool:
    """Whether a name or an address, without brackets, is one of this machine's."""
    return any(can_bind(family, address) for family, address in _addresses(host))


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel probe a connection on which nothing is said, and end it after two minutes.

    A machine may lose its power without a word, and a firewall may forget a connection that is
    silent while the chief evaluates, say.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("IDLE", "INTVL", "CNT"), _KEEPALIVE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def _names_loopback(host: str) -> bool:
    return any(_is_loopback(address[0]) for _, address in _addresses(host))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def can_bind(family: int, address: tuple[Any, ...]) -> bool:
    """Whether an address is one of this machine's."""
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
