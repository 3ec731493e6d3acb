"""Calls ports of a job, as strangers and as the job's own processes do."""

from __future__ import annotations

import socket
from typing import Any

from tests.support.launching import wait_for
from tfmulti.cluster import handshake
from tfmulti.cluster.messages import TcpMessageConnection
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.connect import JoinListener
from tfmulti.launch.hosts import parse_hosts

HOST = "127.0.0.1"
SECRET = "known to both sides"
NONCE = "00" * 16


def knock(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HOST, port), 5)
    connection.settimeout(10)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except OSError:
        return True


class MasterPort:
    """The launcher's master port, at which the machine b is expected."""

    name = "b"
    program = ("train", "--epochs", "3")

    def __init__(self) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        config = LaunchConfig(
            program=self.program,
            module=True,
            master_port=self.port,
            node_rank=0,
            hosts=parse_hosts("a:1,b:1"),
            secret=SECRET,
        )
        self.key = SECRET.encode()
        self.listener = JoinListener(config, HOST, [HOST, HOST], {"a", "b"}.__contains__)

    def comes_in(self) -> bool:
        """Returns whether the machine b is still accepted."""
        connection = TcpMessageConnection(knock(self.port))
        handshake.authenticate(connection, self.key, self.name)
        connection.send({"program": "\0".join(self.program)})
        wait_for(lambda: self.name in self.listener._waiting)
        connection.close()
        return True

    def close(self) -> None:
        self.listener.close(0)


class StubMachine:
    """The machine of an agent, which only records the calls of its methods."""

    cores, gpus, name, secret = 1, 0, "h", "s"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def statuses(self) -> list[Any]:
        return []

    def reserve(self, count: int) -> list[str]:
        self.calls.append(count)
        return ["h:1"] * min(count, 3)

    def start(self, requests: Any) -> None:
        self.calls.append(requests)

    def silent(self, addresses: Any) -> list[int]:
        self.calls.append(addresses)
        return []

    def stacks(self) -> dict[int, str]:
        self.calls.append("no argument")
        return {}

    prepare = start
    stop = kill = danger = stacks


# A request to start a worker, as a launcher sends it.
START_REQUEST = {
    "rank": 1,
    "local_rank": 0,
    "local_world": 1,
    "addresses": ["h:1"],
    "run_id": "r",
    "attempt": 2,
    "folder": "/etc",
    "gpus": 0,
    "saved": {"/f": 1},
}
