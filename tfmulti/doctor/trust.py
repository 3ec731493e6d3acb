"""Looks at who may take part in a job of several workers: open ports, and the job's secret.

`check_trust` tells who reaches TensorFlow's servers before they have started. While the job trains,
`open_ports_finding` lists the addresses at which the workers do listen.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.job_secret import SECRET, secret_of
from tfmulti.cluster.layout import address_of
from tfmulti.cluster.listening import is_loopback, is_one_machine
from tfmulti.doctor.finding import OK, WARNING, Finding

# A numeric address and a port.
OpenPort = tuple[str, int]
_SHOWN, _SHOWN_PORTS = 4, 8
_ALL_INTERFACES = ("0.0.0.0", "::")


def check_trust(
    cluster: Cluster, env: Mapping[str, str], addresses: Iterable[str]
) -> list[Finding]:
    """Returns whether strangers may use TensorFlow's servers, or take the place of a worker.

    Args:
        cluster: the cluster, with several workers.
        env: the environment variables.
        addresses: the numeric addresses of this machine; see `own_addresses`.
    """
    is_one = is_one_machine(cluster.hosts)
    return [_grpc_ports(cluster, is_one, addresses), *([] if is_one else [_secret(env)])]


def own_addresses() -> list[str]:
    """Returns the numeric addresses of all interfaces that this process sees."""
    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def own_open_ports() -> list[OpenPort]:
    """Returns the addresses and ports at which this process listens."""
    return sorted(
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    )


def open_ports_finding(
    open_ports: Sequence[Sequence[OpenPort]], grpc_ports: Sequence[int]
) -> Finding:
    """Returns at which addresses the workers listen, with a warning for those that are unexpected.

    TensorFlow's gRPC server listens on all interfaces at the worker's own port. Another finding
    says who may reach it.

    Args:
        open_ports: the addresses and ports at which each worker listens, by rank.
        grpc_ports: the port of TensorFlow's gRPC server of each worker, by rank.
    """
    per_worker, unexpected = [], []
    for rank, (of_worker, grpc_port) in enumerate(zip(open_ports, grpc_ports, strict=True)):
        shown = [
            address_of(ip, port) + (" (gRPC)" if port == grpc_port else "")
            for ip, port in of_worker
        ]
        per_worker.append(f"worker {rank} listens at {', '.join(shown) or 'none'}")
        unexpected += [
            f"{port} of worker {rank}"
            for ip, port in of_worker
            if ip in _ALL_INTERFACES and port != grpc_port
        ]
    more = "; …" if len(per_worker) > _SHOWN_PORTS else ""
    measured = "; ".join(per_worker[:_SHOWN_PORTS]) + more
    if not unexpected:
        return Finding("open ports", OK, measured)
    named = ", ".join(unexpected[:_SHOWN_PORTS])
    return Finding(
        "open ports",
        WARNING,
        f"{measured}: port {named} is open to all interfaces",
        "a worker listens on all interfaces only at the port of TensorFlow's gRPC server",
        "Find the library of the program that opens it, or close it by a firewall.",
    )


def _grpc_ports(cluster: Cluster, is_one: bool, addresses: Iterable[str]) -> Finding:
    """Returns whether only the job reaches the ports of TensorFlow's servers."""
    if all(map(is_loopback, addresses)):
        return Finding("gRPC ports", OK, "nothing outside of this network reaches them")
    shown = ", ".join(cluster.addresses[:_SHOWN]) + (", …" if cluster.size > _SHOWN else "")
    return Finding(
        "gRPC ports",
        WARNING,
        f"TensorFlow will listen on all interfaces ({shown}), and serves anyone who reaches a port",
        "only the machines of the job reach these ports: their operations read and write files",
        "Start the workers by tfmulti launch --isolate, or close the ports by a firewall."
        if is_one
        else "Use a private network, or a firewall that admits only the machines of the job. "
        "In Kubernetes use a NetworkPolicy, which tfmulti kubernetes manifest prints.",
    )


def _secret(env: Mapping[str, str]) -> Finding:
    """Returns whether the workers on several machines prove that they belong to the job."""
    if secret_of(env):
        return Finding("secret", OK, f"the workers prove that they know {SECRET}")
    return Finding(
        "secret",
        WARNING,
        f"there is no {SECRET}, so any program that reaches a worker's ports may take part",
        "a job on several machines has a secret, the same on each of them",
        f"Set {SECRET} on each machine to the output of: "
        "python -c 'import secrets; print(secrets.token_hex())'",
    )
