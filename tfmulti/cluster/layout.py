"""Describes the processes of a job as a scheduler's environment variables do: ranks and hosts.

A scheduler tells each process its rank, the number of processes, and hosts. It does not tell ports.
So a `Layout` is not yet a `Cluster`: the processes agree on free ports first (`port_agreement`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tfmulti.cluster.cluster import Cluster, Task, is_host_name
from tfmulti.cluster.host_lists import MOST_HOSTS
from tfmulti.config.limited_reading import whole_number
from tfmulti.errors import ClusterError

Env = Mapping[str, str]
# The ports of jobs. Linux gives ports from 32,768 on to any program that asks for a free one.
FIRST_PORT, PORTS = 10_000, 20_000
# A process waits this long for the others at the start.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Layout:
    """The place of this process among the processes of a job.

    Attributes:
        environment: the name of the environment that describes the job.
        rank: the rank of this process; 0 is the chief.
        size: the number of processes.
        local_rank: the rank of this process among those of its host.
        local_size: the number of processes of its host.
        host: the name under which the others reach this host.
        chief_hosts: the hosts on which rank 0 may be, the likeliest first. Empty: MPI must tell.
        job: a name of the job, the same in all of its processes and different in other jobs. Empty:
            no variable tells it.
        hosts: the host of each rank, if the environment tells it; else empty.

    Raises:
        ClusterError: a number is out of its range, or a host has no valid name.
    """

    environment: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    chief_hosts: tuple[str, ...]
    job: str
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, number, end in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
        ):
            if not 0 <= number < end:
                raise ClusterError(
                    f"{self.environment}: the {what} is {number}, but there are {end} processes "
                    f"(0..{end - 1}). Start all processes of the job by one command, or give "
                    "--environment none to train without the others."
                )
        for name in {self.host, *self.chief_hosts, *self.hosts}:
            # An IPv6 address has no brackets here.
            if not is_host_name(name.replace(":", "")):
                raise ClusterError(
                    f"{self.environment}: {name[:80]!r} is not the name of a host. Start the "
                    "processes by the scheduler's own command, or give --environment none."
                )

    def port(self, number: int) -> int:
        """Returns the planned port of a number: a process's local rank, or a further one."""
        return FIRST_PORT + (zlib.crc32(self.job.encode()) + number) % PORTS

    @property
    def planned(self) -> Cluster | None:
        """The cluster if all planned ports are free; None if no variables tell hosts and job."""
        if not (self.hosts and self.job):
            return None
        last_local_rank: dict[str, int] = {}
        addresses = []
        for host in self.hosts:
            last_local_rank[host] = last_local_rank.get(host, -1) + 1
            addresses.append(address_of(host, self.port(last_local_rank[host])))
        return self.cluster(tuple(addresses))

    def cluster(self, addresses: tuple[str, ...]) -> Cluster:
        """Returns the cluster of this layout with the address of each rank."""
        return Cluster(
            addresses,
            Task("worker", self.rank),
            local_rank=self.local_rank,
            local_size=self.local_size,
        )


def address_of(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address.

    >>> address_of("fe80::1", 2222)
    '[fe80::1]:2222'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def number_of(env: Env, name: str, environment: str, least: int = 0) -> int:
    """Returns the whole number of a variable: a rank, or a count of processes.

    Raises:
        ClusterError: the variable is not set, or is not a whole number from `least` to
            `MOST_HOSTS`.
    """
    number = whole_number(env.get(name, "").strip())
    if number is None or not least <= number <= MOST_HOSTS:
        what = f"{env[name].strip()[:80]!r}" if name in env else "not set"
        raise ClusterError(
            f"{environment}: {name} is {what}, but it must be a whole number from {least} to "
            f"{MOST_HOSTS:,}. Start the processes by the scheduler's own command, or give "
            "--environment none."
        )
    return number
