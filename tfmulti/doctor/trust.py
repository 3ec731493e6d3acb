"""Looks at who may take part in a job of several workers: open ports, and the job's secret.

`check_trust` tells who reaches TensorFlow's servers before they have started. While the job trains,
`doors_finding` lists the addresses at which the workers do listen.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.job_secret import SECRET, secret_of
from tfmulti.cluster.listening import is_loopback, is_one_machine
from tfmulti.doctor.finding import OK, WARNING, Finding

# An address and a port.
Door = tuple[str, int]
_SHOWN, _SHOWN_DOORS = 4, 8
_ALL = ("0.0.0.0", "::")


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
    return [_open_ports(cluster, is_one, addresses), *([] if is_one else [_secret(env)])]


def own_addresses() -> list[str]:
    """Returns the numeric addresses of all interfaces that this process sees."""
    return [
        each.address
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def own_doors() -> list[Door]:
    """Returns the addresses and ports at which this process listens."""
    return sorted(
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr
    )


def doors_finding(doors: Sequence[Sequence[Door]], ports: Sequence[int]) -> Finding:
    """Returns at which addresses the workers listen, with a warning for those that are unexpected.

    TensorFlow's gRPC server listens on all interfaces at the worker's own port. Another finding
    says who may reach it.

    Args:
        doors: the addresses and ports at which each worker listens, by rank.
        ports: the port of each worker, at which TensorFlow's gRPC server listens, by rank.
    """
    per_worker, others = [], []
    for rank, (own, port) in enumerate(zip(doors, ports, strict=True)):
        shown = [
            (f"[{ip}]:{at}" if ":" in ip else f"{ip}:{at}") + (" (gRPC)" if at == port else "")
            for ip, at in own
        ]
        per_worker.append(f"worker {rank} listens at {', '.join(shown) or 'none'}")
        others += [(rank, at) for ip, at in own if ip in _ALL and at != port]
    measured = "; ".join(per_worker[:_SHOWN_DOORS]) + (
        "; …" if len(per_worker) > _SHOWN_DOORS else ""
    )
    if not others:
        return Finding("doors", OK, measured)
    named = ", ".join(f"{port} of worker {rank}" for rank, port in others[:_SHOWN_DOORS])
    return Finding(
        "doors",
        WARNING,
        f"{measured}: port {named} is open to all interfaces",
        "a worker listens on all interfaces only at the port of TensorFlow's gRPC server",
        "Look which library of the program opens it, or close it by a firewall.",
    )


def _open_ports(cluster: Cluster, is_one: bool, addresses: Iterable[str]) -> Finding:
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
