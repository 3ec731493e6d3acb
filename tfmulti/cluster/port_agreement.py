"""Lets the processes of a scheduler's job tell each other their addresses before TensorFlow starts.

A scheduler tells ranks and hosts, but no ports. So each process reserves a port of its own, and the
chief (rank 0) collects the addresses and gives each process all of them. The messages of one
connection are lines of JSON:

    process:  {"hello": random hex, "job": name, "rank": 3}
    chief:    {"hello": random hex, "proof": proof(key, "answers", both hellos)}
    process:  {"host": "n2", "port": 17003, "gpus": 1, "proof": proof(key, "calls", both hellos)}
    chief:    {"addresses": ["n1:17001", …]}, once all have come, or {"error": "…"}

The key is the job's secret (TFMULTI_SECRET), if there is one. Without it the key is the name of the
job, which keeps out other jobs but no attacker, as TensorFlow's own ports do (docs/security.md).
The chief listens at the first free port of a few that follow from the name of the job. The others
try these ports in turn.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.job_secret import is_proof, proof, secret_of
from tfmulti.cluster.layout import Layout, address_of
from tfmulti.cluster.listening import LOOPBACK, listen
from tfmulti.config import json_values
from tfmulti.errors import ClusterError

TIMEOUT_S = 300.0
# The chief's port is one of so many, beyond those of the processes of a host.
CANDIDATES, _FIRST_CANDIDATE = 8, 1000
_MOST_BYTES = 1 << 22
# A caller must say something in this time, and so many may call at once.
_STRANGER_S, _AT_ONCE = 5.0, 64
_AGAIN_S = 0.2


@dataclass(frozen=True)
class Told:
    """What a process tells the chief: its address, and how many GPUs it has for itself."""

    address: str
    gpus: int


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
        ClusterError: a process has not come in time, the chief cannot be reached, or the processes
            have different numbers of GPUs.
        ConfigError: TFMULTI_SECRET cannot be a secret.
    """
    key = f"{secret_of(env)} {layout.job}".encode()
    deadline_s = time.monotonic() + timeout_s
    with _reserved_port(layout) as port:
        own = Told(address_of(layout.host, port), gpus)
        if layout.rank == 0:
            found = _Chief(layout, key, own).collect(deadline_s, timeout_s)
        else:
            found = _asked_of_chief(layout, key, own, deadline_s, timeout_s)
    return layout.cluster(found)


@contextlib.contextmanager
def _reserved_port(layout: Layout) -> Iterator[int]:
    """Gives the planned port of this process, or another one if that is not free.

    The port is bound, but does not listen. So the system gives it to nobody, and TensorFlow, which
    sets SO_REUSEADDR, may listen at it afterwards.
    """
    host = LOOPBACK if layout.host == LOOPBACK else ""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        planned = layout.port(layout.local_rank)
        try:
            # Another program may listen at the port on one address alone, or be bound without
            # listening, as another job's process is.
            with socket.socket() as trial:
                trial.bind((host, planned))
            held.bind((host, planned))
        except OSError:
            held.bind((host, 0))
        yield held.getsockname()[1]


class _Chief:
    """Collects the addresses of all processes, and gives them to each."""

    def __init__(self, layout: Layout, key: bytes, own: Told) -> None:
        self._layout, self._key = layout, key
        self._told: dict[int, Told] = {0: own}
        self._links: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._places = threading.BoundedSemaphore(_AT_ONCE)

    def collect(self, deadline_s: float, timeout_s: float) -> tuple[str, ...]:
        """Returns the address of each rank, after all others have got them."""
        size = self._layout.size
        with _listening(self._layout) as listener, contextlib.closing(_Ending(self._links)):
            listener.settimeout(_AGAIN_S)
            while True:
                with self._changed:
                    missing = [rank for rank in range(size) if rank not in self._told]
                if not missing:
                    return self._give_all()
                if time.monotonic() > deadline_s:
                    raise ClusterError(_missing(self._layout, missing, timeout_s))
                with contextlib.suppress(TimeoutError):
                    link, _ = listener.accept()
                    if self._places.acquire(blocking=False):
                        threading.Thread(target=self._answer, args=(link,), daemon=True).start()
                    else:
                        link.close()

    def _answer(self, link: socket.socket) -> None:
        """Hears one caller, and keeps its connection if it is a process of the job."""
        kept = False
        try:
            link.settimeout(_STRANGER_S)
            with link.makefile("rb") as lines:
                hello = _line(lines)
                rank = hello.get("rank")
                ours = secrets.token_hex()
                both = _both(hello, ours)
                known = (
                    isinstance(rank, int)
                    and 0 < rank < self._layout.size
                    and hello.get("job") == self._layout.job
                )
                if not known or not isinstance(rank, int):
                    return
                _send(link, {"hello": ours, "proof": proof(self._key, b"answers", *both).hex()})
                told = _line(lines)
                if is_proof(_bytes(told.get("proof")), self._key, b"calls", *both):
                    kept = self._keep(rank, told, link)
        except (OSError, ValueError):
            # A stranger, or a process that has ended. A process of the job calls again.
            pass
        finally:
            self._places.release()
            if not kept:
                link.close()

    def _keep(self, rank: int, told: Mapping[str, Any], link: socket.socket) -> bool:
        """Notes what a process told, and returns whether that was of the right form."""
        host, port, gpus = (told.get(name) for name in ("host", "port", "gpus"))
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(gpus, int)):
            return False
        with self._changed:
            before = self._links.pop(rank, None)
            self._links[rank] = link
            self._told[rank] = Told(address_of(host, port), gpus)
        if before is not None:
            before.close()
        return True

    def _give_all(self) -> tuple[str, ...]:
        """Sends all addresses to all processes; raises ClusterError if they cannot train."""
        told = [self._told[rank] for rank in range(self._layout.size)]
        addresses = tuple(each.address for each in told)
        error = _unequal(self._layout, [each.gpus for each in told])
        if len(set(addresses)) < len(addresses):
            error = f"{self._layout.environment}: two processes have the same address: "
            error += f"{', '.join(addresses)}. Does each host have a name of its own?"
        for link in self._links.values():
            with contextlib.suppress(OSError):
                _send(link, {"error": error} if error else {"addresses": addresses})
        if error:
            raise ClusterError(error)
        return addresses


class _Ending:
    """Closes connections at the end of a context."""

    def __init__(self, links: Mapping[int, socket.socket]) -> None:
        self._links = links

    def close(self) -> None:
        for link in self._links.values():
            link.close()


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


def _asked_of_chief(
    layout: Layout, key: bytes, own: Told, deadline_s: float, timeout_s: float
) -> tuple[str, ...]:
    """Returns the address of each rank, which the chief has told.

    Raises:
        ClusterError: the chief cannot be reached in time, or says why the processes cannot train.
    """
    reason = ""
    while time.monotonic() < deadline_s:
        for host, port in _candidates(layout):
            try:
                with socket.create_connection((host, port), _STRANGER_S) as link:
                    found = _ask(link, layout, key, own, deadline_s)
            except OSError as error:
                reason = reason or f"{host}: {error}"
                continue
            except ValueError as error:
                # This tells more than that nobody listens at another port.
                reason = f"{host}: {error}"
                continue
            if "error" in found:
                raise ClusterError(str(found["error"]))
            addresses = found.get("addresses")
            if isinstance(addresses, list) and len(addresses) == layout.size:
                return tuple(map(str, addresses))
        time.sleep(_AGAIN_S)
    raise ClusterError(
        f"{layout.environment}: process {layout.rank} has not reached process 0 on "
        f"{' or '.join(layout.chief_hosts)} within {timeout_s:.0f} s ({reason}). Did process 0 "
        "start, does the name resolve here, and does a firewall stand between?"
    )


def _ask(
    link: socket.socket, layout: Layout, key: bytes, own: Told, deadline_s: float
) -> dict[str, Any]:
    """Returns the chief's answer on one connection.

    Raises:
        ValueError: another program answers, or another job's chief.
        OSError: the connection ends, or nothing comes.
    """
    ours = {"hello": secrets.token_hex(), "job": layout.job, "rank": layout.rank}
    _send(link, ours)
    with link.makefile("rb") as lines:
        answer = _line(lines)
        both = _both(ours, answer.get("hello"))
        if not is_proof(_bytes(answer.get("proof")), key, b"answers", *both):
            raise ValueError("another program or job answers")
        host, _, port = own.address.rpartition(":")
        told = {"host": host.strip("[]"), "port": int(port), "gpus": own.gpus}
        _send(link, told | {"proof": proof(key, b"calls", *both).hex()})
        # The chief answers when all processes have come.
        link.settimeout(max(_AGAIN_S, deadline_s - time.monotonic()))
        return _line(lines)


@contextlib.contextmanager
def _listening(layout: Layout) -> Iterator[socket.socket]:
    """Gives a socket that listens at the first candidate port that is free."""
    reason = ""
    hosts = [layout.host] if layout.host == LOOPBACK else [layout.host, ""]
    for number in range(CANDIDATES):
        try:
            listener = listen(layout.host, hosts, layout.port(_FIRST_CANDIDATE + number))
        except OSError as error:
            reason = str(error)
            continue
        with listener:
            yield listener
        return
    raise ClusterError(
        f"{layout.environment}: none of the {CANDIDATES} ports from "
        f"{layout.port(_FIRST_CANDIDATE)} on is free on {layout.host} ({reason}). Start the job "
        "again, or end what holds them."
    )


def _candidates(layout: Layout) -> Iterator[tuple[str, int]]:
    """Yields the addresses at which the chief may listen."""
    for number in range(CANDIDATES):
        for host in layout.chief_hosts:
            yield host, layout.port(_FIRST_CANDIDATE + number)


def _missing(layout: Layout, ranks: list[int], timeout_s: float) -> str:
    """Returns the message about processes that have not connected."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return (
        f"{layout.environment}: {len(ranks)} of {layout.size} processes have not connected within "
        f"{timeout_s:.0f} s (ranks {shown}). Did they start, and can they reach {layout.host}?"
    )


def _send(link: socket.socket, message: Mapping[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _line(lines: Any) -> dict[str, Any]:
    """Returns the next line's object; raises ValueError if it is none."""
    line = lines.readline(_MOST_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the connection has ended")
    message = json_values.parse(line.decode())
    if not isinstance(message, dict):
        raise ValueError("a line is no JSON object")
    return message


def _both(hello: Mapping[str, Any], answer: object) -> tuple[bytes, bytes]:
    """Returns the parts that both sides prove: all of the caller's hello, and the chief's."""
    return json.dumps(dict(sorted(hello.items()))).encode(), str(answer).encode()


def _bytes(text: object) -> bytes:
    """Returns the bytes of a text of hexadecimal digits, or none."""
    with contextlib.suppress(ValueError, TypeError):
        return bytes.fromhex(str(text))
    return b""
