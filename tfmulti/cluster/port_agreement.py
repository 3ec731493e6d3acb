"""Lets the processes of a scheduler's job exchange their addresses before TensorFlow starts.

A scheduler tells ranks and hosts, but no ports. So each process reserves a port of its own, and the
chief (rank 0) collects the addresses and gives each process all of them. A process calls the chief,
with its rank as its name. Both prove that they belong to the job, and sign their messages
(`tfmulti.cluster.handshake`), which are:

    process:  {"host": "n2", "port": 17003, "gpus": 1}
    chief:    {"addresses": ["n1:17001", …]}, once all have come, or {"error": "…"}

The key is the job's secret (TFMULTI_SECRET) with the name of the job. Without a secret the name
alone is left, which keeps out other jobs but no attacker, as TensorFlow's own ports do
(docs/security.md). The chief listens at the first free port of a few that follow from the name of
the job. The others try these ports in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.handshake import LONGEST_NAME, HandshakeServer, authenticate
from tfmulti.cluster.job_secret import SECRET, secret_of
from tfmulti.cluster.layout import TIMEOUT_S, Layout, address_of
from tfmulti.cluster.listening import LOOPBACK, listen
from tfmulti.cluster.messages import TcpMessageConnection
from tfmulti.config import json_values
from tfmulti.config.limited_reading import whole_number
from tfmulti.config.troubleshooting import documented
from tfmulti.errors import ClusterError

# The chief tries this many ports, which come after the ports of the processes of a host.
CANDIDATES, _FIRST_CANDIDATE = 8, 1000
# A process tries this many ports, at this distance from each other.
_ATTEMPTS, _DISTANCE = 10, 2000
# The limits of a message after the handshake, and of a number of GPUs.
_MOST_BYTES, _MOST_GPUS, _LONGEST_ERROR = 1 << 22, 1 << 16, 2000
_CALL_S, _RETRY_S = 5.0, 0.2


@dataclass(frozen=True)
class ProcessInfo:
    """What a process sends to the chief: its address, and the number of its own GPUs.

    Raises:
        ClusterError: the host or the port has a wrong form.
        ValueError: the host has a name that cannot be printed, or a number is out of its range.
    """

    host: str
    port: int
    gpus: int

    def __post_init__(self) -> None:
        if not (self.host.isprintable() and len(self.host) <= LONGEST_NAME):
            raise ValueError("a host cannot have such a name")
        if not 0 <= self.gpus <= _MOST_GPUS:
            raise ValueError("a process cannot have so many GPUs")
        # This checks the form of the address.
        Cluster((self.address,), Task("worker", 0))

    @property
    def address(self) -> str:
        """The address at which the process listens."""
        return address_of(self.host, self.port)


def agree(
    layout: Layout, env: Mapping[str, str], *, gpus: int = 0, timeout_s: float = TIMEOUT_S
) -> Cluster:
    """Returns the cluster of a layout with addresses at which every process can listen.

    Every process of the job calls it, and it waits for all of them.

    Args:
        layout: the place of this process among those of its job.
        env: the environment, which may hold the job's secret.
        gpus: how many GPUs this process has for itself.
        timeout_s: the seconds after which it gives up.

    Raises:
        ClusterError: a process has not connected in time, the chief cannot be reached, no port is
            free, or the processes have different numbers of GPUs.
        ConfigError: TFMULTI_SECRET cannot be a secret.
    """
    secret = secret_of(env)
    key = f"{secret} {layout.job}".encode()
    if layout.rank == 0 and not secret and not _has_one_host(layout):
        print(f"tfmulti: {_no_secret(layout)}", file=sys.stderr, flush=True)
    deadline_s = time.monotonic() + timeout_s
    with _reserved_port(layout) as port:
        own_info = ProcessInfo(layout.host, port, gpus)
        if layout.rank == 0:
            addresses = _Chief(layout, key, own_info).collect(timeout_s)
        else:
            addresses = _addresses_from_chief(layout, key, own_info, deadline_s, timeout_s)
    return layout.cluster(addresses)


@contextlib.contextmanager
def _reserved_port(layout: Layout) -> Iterator[int]:
    """Gives the planned port of this process, or else a further one of the job.

    The port is bound, but does not listen. So the system gives it to nobody, and TensorFlow, which
    sets SO_REUSEADDR, may listen at it afterwards.
    """
    host = LOOPBACK if layout.host == LOOPBACK else ""
    with socket.socket() as sock:
        for attempt in range(_ATTEMPTS):
            try:
                sock.bind((host, layout.port(layout.local_rank + attempt * _DISTANCE)))
                break
            except OSError as error:
                reason = str(error)
        else:
            raise ClusterError(
                f"{layout.environment}: none of the {_ATTEMPTS} ports of process {layout.rank} is "
                f"free ({reason}). Start the job again, or end what holds them."
            )
        # Before the bind this option would let a second process bind the same port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield sock.getsockname()[1]


class _Chief:
    """Collects the addresses of all processes, and sends all of them to each process."""

    def __init__(self, layout: Layout, key: bytes, own_info: ProcessInfo) -> None:
        self._layout, self._key = layout, key
        self._infos: dict[int, ProcessInfo] = {0: own_info}
        self._connections: dict[int, TcpMessageConnection] = {}
        self._changed = threading.Condition()

    def collect(self, timeout_s: float) -> tuple[str, ...]:
        """Returns the address of each rank, after sending all of them to the other processes."""
        size = self._layout.size
        with _listening(self._layout) as listener:
            try:
                server = HandshakeServer(
                    listener,
                    self._key,
                    self._add,
                    is_known=self._is_rank,
                    most_bytes=_MOST_BYTES,
                )
            except OSError as error:
                raise ClusterError(
                    f"{self._layout.environment}: process 0 cannot wait for the others: "
                    f"{error.strerror}. Raise the limit (ulimit -u), or start fewer processes."
                ) from None
            with contextlib.closing(server), self._changed:
                self._changed.wait_for(lambda: len(self._infos) == size, timeout_s)
                try:
                    missing = [rank for rank in range(size) if rank not in self._infos]
                    if missing:
                        raise ClusterError(_missing(self._layout, missing, timeout_s))
                    return self._send_all()
                finally:
                    for connection in self._connections.values():
                        connection.close()

    def _is_rank(self, name: str) -> bool:
        """Returns whether a name is the rank of another process of the job."""
        rank = whole_number(name)
        return rank is not None and 0 < rank < self._layout.size

    def _add(self, name: str, first: dict[str, Any], connection: TcpMessageConnection) -> None:
        """Notes the address of a process, and keeps its connection for the answer."""
        info, rank = json_values.build(ProcessInfo, first), int(name)
        with self._changed:
            before = self._connections.pop(rank, None)
            self._connections[rank] = connection
            self._infos[rank] = info
            self._changed.notify_all()
        if before is not None:
            before.close()

    def _send_all(self) -> tuple[str, ...]:
        """Sends all addresses to all processes; raises ClusterError if they cannot train."""
        infos = [self._infos[rank] for rank in range(self._layout.size)]
        addresses = tuple(info.address for info in infos)
        error = _unequal(self._layout, [info.gpus for info in infos])
        if len(set(addresses)) < len(addresses):
            error = f"{self._layout.environment}: two processes have the same address: "
            error += f"{', '.join(addresses)}. Does each host have a name of its own?"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.limit(_CALL_S)
                connection.send({"error": error} if error else {"addresses": addresses})
        if error:
            raise ClusterError(error)
        return addresses


def _no_secret(layout: Layout) -> str:
    """Returns the warning about a job on several hosts without a secret, with the next step."""
    step = (
        "Run this once, in the shell that starts the job: "
        f"export {SECRET}=$(python -c 'import secrets; print(secrets.token_hex())')"
    )
    if layout.environment == "mpi":
        step += f" and give Open MPI's mpirun -x {SECRET}."
    elif layout.environment == "azureml":
        step = "Set it to a random text in environment_variables of the job."
    danger = documented(
        f"warning: {layout.environment}: the processes run on several hosts without {SECRET}, so "
        "any user who reaches their ports can take the place of one"
    )
    return f"{danger}. {step}"


def _unequal(layout: Layout, gpus: list[int]) -> str:
    """Returns why processes with these numbers of GPUs cannot train, or an empty text."""
    if len(set(gpus)) == 1:
        return ""
    other = next(rank for rank, count in enumerate(gpus) if count != gpus[0])
    return (
        f"{layout.environment}: process 0 has {gpus[0]} GPUs for itself, but process {other} has "
        f"{gpus[other]}; TensorFlow needs as many on each. Start as many processes on each host "
        "(Slurm: --ntasks-per-node and --gpus-per-node)."
    )


def _addresses_from_chief(
    layout: Layout, key: bytes, own_info: ProcessInfo, deadline_s: float, timeout_s: float
) -> tuple[str, ...]:
    """Returns the address of each rank, as the chief sends them.

    Raises:
        ClusterError: the chief cannot be reached in time, or says why the processes cannot train.
    """
    reason = ""
    while time.monotonic() < deadline_s:
        for host, port in _candidates(layout):
            try:
                sock = socket.create_connection((host, port), _CALL_S)
                with contextlib.closing(TcpMessageConnection(sock)) as connection:
                    authenticate(connection, key, str(layout.rank), _MOST_BYTES)
                    connection.send(dataclasses.asdict(own_info))
                    # The chief answers when all processes have come.
                    connection.limit(max(_RETRY_S, deadline_s - time.monotonic()))
                    answer = _answer(layout, own_info, connection.expect())
            except OSError as error:
                reason = reason or f"{host}: {error}"
                continue
            except ValueError as error:
                # This tells more than that nobody listens at another port.
                reason = f"{host}: {error}"
                continue
            if isinstance(answer, str):
                raise ClusterError(answer)
            return answer
        time.sleep(_RETRY_S)
    raise ClusterError(
        f"{layout.environment}: process {layout.rank} has not reached process 0 on "
        f"{' or '.join(layout.chief_hosts)} within {timeout_s:.0f} s ({reason}). Did process 0 "
        "start, does the name resolve here, and is there a firewall between?"
    )


def _answer(
    layout: Layout, own_info: ProcessInfo, message: Mapping[str, Any]
) -> tuple[str, ...] | str:
    """Returns the addresses of all ranks in a message of the chief, or the error in it.

    Raises:
        ValueError: the message has another form.
    """
    error, addresses = message.get("error"), message.get("addresses")
    if isinstance(error, str) and error.isprintable():
        return error[:_LONGEST_ERROR]
    if isinstance(addresses, list) and len(addresses) == layout.size:
        with contextlib.suppress(ClusterError, TypeError):
            cluster = layout.cluster(tuple(addresses))
            is_printable = "".join(addresses).isprintable()
            if is_printable and cluster.addresses[layout.rank] == own_info.address:
                return cluster.addresses
    raise ValueError("process 0 has sent no addresses")


@contextlib.contextmanager
def _listening(layout: Layout) -> Iterator[socket.socket]:
    """Gives a socket that listens at the first candidate port that is free."""
    reason = ""
    host = LOOPBACK if _has_one_host(layout) else layout.host
    hosts = [host] if host == LOOPBACK else [host, ""]
    for number in range(CANDIDATES):
        try:
            listener = listen(host, hosts, layout.port(_FIRST_CANDIDATE + number))
        except OSError as error:
            reason = str(error)
            continue
        with listener:
            yield listener
        return
    raise ClusterError(
        f"{layout.environment}: none of the {CANDIDATES} ports from "
        f"{layout.port(_FIRST_CANDIDATE)} on is free on {host} ({reason}). Start the job "
        "again, or end what holds them."
    )


def _candidates(layout: Layout) -> Iterator[tuple[str, int]]:
    """Yields the addresses at which the chief may listen."""
    hosts = layout.chief_hosts
    if _has_one_host(layout):
        # Some environments only let a process guess how many others its host has. Then process 0
        # may see that differently.
        hosts = (LOOPBACK, *(host for host in hosts if host != LOOPBACK))
    for number in range(CANDIDATES):
        for host in hosts:
            yield host, layout.port(_FIRST_CANDIDATE + number)


def _has_one_host(layout: Layout) -> bool:
    """Returns whether one host has all processes, so that nothing on the network may call."""
    return layout.local_size >= layout.size


def _missing(layout: Layout, ranks: list[int], timeout_s: float) -> str:
    """Returns the message about processes that have not connected."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return (
        f"{layout.environment}: {len(ranks)} of {layout.size} processes have not connected within "
        f"{timeout_s:.0f} s (ranks {shown}). Did they start, and can they reach {layout.host}?"
    )
