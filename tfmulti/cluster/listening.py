"""Chooses the address at which a process of a job listens, with as few interfaces as possible."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

LOOPBACK = "127.0.0.1"
# The seconds before the first probe, the seconds between probes, and the number of probes.
_KEEPALIVE = (60, 15, 4)


def listen(own: str, hosts: Sequence[str], port: int = 0) -> socket.socket:
    """Returns a socket that listens for the machines of a job.

    The socket listens at the first address of `own` that belongs to this machine. A loopback
    address counts only if all hosts have the name `own`, or all have loopback addresses. Debian,
    for example, gives a machine's own name the address 127.0.1.1, which other machines cannot
    reach. If no address is left, the socket listens on all interfaces.

    Args:
        own: the name or address by which the others reach this machine, without brackets.
        hosts: the names or addresses of all machines of the job.
        port: the port. 0 lets the kernel choose a free one.

    Raises:
        OSError: the port is in use.
    """
    is_one_host = all(host == own for host in hosts)
    for family, address in _addresses(own):
        if is_loopback(address[0]) and not is_one_host and not all(map(names_loopback, hosts)):
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
    """Returns whether a name or an address, without brackets, belongs to this machine."""
    return any(can_bind(family, address) for family, address in _addresses(host))


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel probe an idle connection, and close it after two minutes without an answer.

    A machine that loses its power does not close its connections. The probes also keep a firewall
    from dropping a connection that is idle, for example while the chief evaluates.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("IDLE", "INTVL", "CNT"), _KEEPALIVE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Returns the addresses of a host with their families, or none if it is unknown."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in infos]


def is_one_machine(hosts: Sequence[str]) -> bool:
    """Returns whether hosts are one machine: they have one name, or all mean loopback addresses."""
    return len(set(hosts)) == 1 or all(map(names_loopback, hosts))


def names_loopback(host: str) -> bool:
    """Returns whether a name or an address means a loopback address."""
    return any(is_loopback(address[0]) for _, address in _addresses(host))


def is_loopback(address: str) -> bool:
    """Returns whether a numeric address, with or without an IPv6 zone, is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def can_bind(family: int, address: tuple[Any, ...]) -> bool:
    """Returns whether an address belongs to this machine, by binding a socket to it.

    Args:
        family: the address family, such as `socket.AF_INET`.
        address: the address in the form of that family. Its port is not used.
    """
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
