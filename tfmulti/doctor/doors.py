"""Tells at which addresses the workers of a job listen while they train."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from tfmulti.doctor.finding import OK, WARNING, Finding

# An address and a port.
Door = tuple[str, int]
_ALL = ("0.0.0.0", "::")
_SHOWN = 8


def own_doors() -> list[Door]:
    """Returns the addresses and ports at which this process listens."""
    return sorted(
        (each.laddr.ip, each.laddr.port)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid == os.getpid() and each.laddr
    )


def doors_finding(doors: Sequence[Sequence[Door]], ports: Sequence[int]) -> Finding:
    """Returns at which addresses the workers listen, with a warning for those that are unexpected.

    TensorFlow's gRPC server listens on all interfaces at the worker's own port. Another finding
    says who may reach it.

    Args:
        doors: the addresses and ports at which each worker listens, by rank.
        ports: the port of each worker, at which TensorFlow's gRPC server listens, by rank.
    """
    words, others = [], []
    for rank, (own, port) in enumerate(zip(doors, ports, strict=True)):
        told = [
            (f"[{ip}]:{at}" if ":" in ip else f"{ip}:{at}") + (" (gRPC)" if at == port else "")
            for ip, at in own
        ]
        words.append(f"worker {rank} listens at {', '.join(told) or 'none'}")
        others += [(rank, at) for ip, at in own if ip in _ALL and at != port]
    measured = "; ".join(words[:_SHOWN]) + ("; …" if len(words) > _SHOWN else "")
    if not others:
        return Finding("doors", OK, measured)
    named = ", ".join(f"{port} of worker {rank}" for rank, port in others[:_SHOWN])
    return Finding(
        "doors",
        WARNING,
        f"{measured}: port {named} is open to all interfaces",
        "a worker listens on all interfaces only at the port of TensorFlow's gRPC server",
        "Look which library of the program opens it, or close it by a firewall.",
    )
