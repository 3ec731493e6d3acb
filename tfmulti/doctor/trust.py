"""Looks at who may take part in a job of several workers: open ports, and the job's secret."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

import psutil

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.job_secret import SECRET, secret_of
from tfmulti.cluster.listening import is_loopback, is_one_machine
from tfmulti.doctor.finding import OK, WARNING, Finding

_SHOWN = 4


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
