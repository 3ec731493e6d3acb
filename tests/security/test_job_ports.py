"""Tests that strangers at a port cost a job nothing: the launcher's, the agreement's, the doctor's.

Each test ends with a process of the job that comes in by the same port.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.callers import HOST, NONCE, SECRET, MasterPort, is_closed, knock
from tests.support.launching import wait_for
from tfmulti.cluster import handshake, port_agreement
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.layout import Layout
from tfmulti.cluster.messages import TcpMessageConnection
from tfmulti.doctor.network import Network
from tfmulti.launch.addresses import reserved

pytestmark = pytest.mark.processes

_jobs = itertools.count()


class AgreementPort:
    """The port of rank 0 of a scheduler's job, at which rank 1 is expected."""

    name = "1"

    def __init__(self) -> None:
        job = f"ports {os.getpid()} {next(_jobs)}"
        self.jobs = [
            Layout("slurm", rank, 2, rank, 2, HOST, (HOST,), job, (HOST,) * 2) for rank in (0, 1)
        ]
        self.port, self.key = self.jobs[0].port(1000), f"{SECRET} {job}".encode()
        self.pool = ThreadPoolExecutor(1)
        self.chief = self.pool.submit(self.agree, 0)
        wait_for(self.listens)

    def agree(self, rank: int) -> Cluster:
        return port_agreement.agree(self.jobs[rank], {"TFMULTI_SECRET": SECRET}, timeout_s=30.0)

    def listens(self) -> bool:
        """Returns whether the chief answers; it listens a moment before it starts its thread."""
        try:
            with knock(self.port, b"\n") as stranger:
                return is_closed(stranger)
        except OSError:
            return False

    def comes_in(self) -> bool:
        return self.agree(1).addresses == self.chief.result().addresses

    def close(self) -> None:
        if not self.chief.done():
            self.comes_in()
        self.pool.shutdown()


class DoctorPort:
    """The port of the doctor's worker 0, at which worker 1 is expected."""

    name = "1"

    def __init__(self) -> None:
        self.reserved = reserved(2)
        self.addresses = tuple(self.reserved.__enter__())
        self.port = int(self.addresses[0].rpartition(":")[2])
        self.network = self.worker(0)
        self.key = self.network.key_of(0)

    def worker(self, rank: int) -> Network:
        cluster = Cluster(self.addresses, Task("worker", rank))
        return Network(cluster, {"TFMULTI_SECRET": SECRET}, 10.0)

    def comes_in(self) -> bool:
        with self.worker(1) as other:
            measured = other.measure()
        assert measured.errors == {}
        return measured.mb_s["0"] > 0

    def close(self) -> None:
        self.network.__exit__()
        self.reserved.__exit__(None, None, None)


JobPort = MasterPort | AgreementPort | DoctorPort


@pytest.fixture(params=[MasterPort, AgreementPort, DoctorPort])
def port(request: pytest.FixtureRequest) -> Iterator[JobPort]:
    job_port = request.param()
    yield job_port
    job_port.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95cos\nsystem\n",
        b"[]\n",
        b'{"ask": "take", "result": {}}\n',
        b'{"name": 3}\n',
        b'{"name": {"a": "b"}, "program": "x"}\n',
        b'{"name": "' + b"b" * 400 + b'"}\n',
        b"[" * 60_000 + b"\n",
        b'{"name": "NAME"' + b" " * handshake.HANDSHAKE_BYTES + b"}\n",
        b'{"name": "NAME", "nonce": ""}\n',
        b'{"name": "NAME", "nonce": 7}\n',
        b'{"name": "NAME", "nonce": "no hexadecimal"}\n',
        b'{"name": "NAME", "nonce": "' + NONCE.encode() * 2 + b'"}\n',
    ],
)
def test_a_caller_that_says_nonsense_is_rejected(port: JobPort, data: bytes) -> None:
    with knock(port.port, data.replace(b"NAME", port.name.encode())) as stranger:
        assert is_closed(stranger)
    assert port.comes_in()


@pytest.mark.parametrize("port", [AgreementPort, DoctorPort], indirect=True)
@pytest.mark.parametrize("name", ["9", "1 1"])
def test_a_rank_that_the_job_does_not_have_is_rejected(port: JobPort, name: str) -> None:
    line = json.dumps({"name": name, "nonce": NONCE}).encode() + b"\n"
    assert is_closed(knock(port.port, line))
    assert port.comes_in()


@pytest.mark.parametrize(
    "second",
    [b"", b"{}", b'{"proof": ""}', b'{"proof": "' + b"00" * 32 + b'"}', b'{"port": 17003}'],
)
def test_a_caller_without_a_proof_is_rejected(port: JobPort, second: bytes) -> None:
    with knock(port.port) as stranger:
        connection = TcpMessageConnection(stranger)
        connection.send({"name": port.name, "nonce": NONCE})
        assert len(connection.expect()["proof"]) == 64
        stranger.sendall(second + b"\n")
        assert is_closed(stranger)
    assert port.comes_in()


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"host": "h", "port": True, "gpus": 0},
        {"host": "h", "port": 10**400, "gpus": 0},
        {"host": "h\x1b[2J", "port": 1, "gpus": 0},
        {"host": "h", "port": 1, "gpus": 10**400},
        {"host": "h", "port": 1, "gpus": 0, "more": 0},
        {"ask": "load", "bytes": True},
        {"ask": "load", "bytes": 1 << 40},
        {"ask": "take", "result": []},
        {"program": "another"},
        {"program": ["train", "--epochs", "3"]},
    ],
)
def test_a_process_of_the_job_that_says_nonsense_costs_nothing(
    port: JobPort, first: dict[str, Any]
) -> None:
    """A process may have another version of tfmulti."""
    connection = TcpMessageConnection(knock(port.port))
    handshake.authenticate(connection, port.key, port.name)
    connection.send(first)
    connection.limit(1.0)
    while connection.receive() is not None:
        pass
    connection.close()
    assert port.comes_in()


@pytest.mark.parametrize("name", ["\ud800", "b\n", "\0", "b" * 300, 3, None, {}, "\x1b[2J"])
def test_no_handshake_blocks_a_connection_for_ever(port: JobPort, name: Any) -> None:
    """In an earlier version 64 names that cannot be encoded blocked all later connections."""
    for _ in range(3):
        line = json.dumps({"name": name, "nonce": NONCE}).encode() + b"\n"
        assert is_closed(knock(port.port, line))
    assert port.comes_in()


def test_a_lack_of_threads_does_not_stop_the_listener(
    port: JobPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake.threading, "Thread", Mock(side_effect=RuntimeError("no more")))
    for _ in range(3):
        assert is_closed(knock(port.port))
    monkeypatch.undo()
    assert port.comes_in()


def test_too_many_open_files_do_not_stop_the_listener(
    port: JobPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, []

    def failing(self: socket.socket) -> Any:
        if len(failed) < 3:
            failed.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    # The server still waits in the original `accept`, which this connection ends.
    with knock(port.port, b"\n"):
        pass
    assert port.comes_in()
    assert len(failed) == 3


def test_an_endless_line_is_not_kept(port: JobPort) -> None:
    """The connection ends after the largest number of bytes that a handshake may have."""
    data = b"x" * handshake.HANDSHAKE_BYTES
    with knock(port.port) as stranger:
        assert sent_until_it_ends(stranger, data, most=2_000) < 2_000
    assert port.comes_in()


def sent_until_it_ends(stranger: socket.socket, data: bytes, most: int, wait_s: float = 0) -> int:
    """Returns how often data was sent before the other side ended the connection."""
    for count in range(most):
        try:
            stranger.sendall(data)
        except OSError:
            return count
        time.sleep(wait_s)
    return most


def test_a_handshake_byte_by_byte_ends(port: JobPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.5)
    with knock(port.port) as stranger:
        assert sent_until_it_ends(stranger, b" ", most=200, wait_s=0.05) < 100
    assert port.comes_in()


def test_silent_callers_keep_nobody_out(port: JobPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest handshake gives its place to a new caller, long before its time is over."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 100.0)
    strangers = [knock(port.port) for _ in range(handshake.HANDSHAKES_AT_ONCE)]
    began = time.monotonic()
    assert port.comes_in()
    assert time.monotonic() - began < 10
    for stranger in strangers:
        stranger.close()


def test_many_at_once_do_not_fill_the_process(
    port: JobPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 100.0)
    before = threading.active_count()
    strangers = [knock(port.port) for _ in range(3 * handshake.HANDSHAKES_AT_ONCE)]
    wait_for(lambda: sum(map(_is_over, strangers)) >= 2 * handshake.HANDSHAKES_AT_ONCE)
    assert threading.active_count() <= before + 2 * handshake.HANDSHAKES_AT_ONCE
    for stranger in strangers:
        stranger.close()
    wait_for(lambda: threading.active_count() <= before + 1)
    assert port.comes_in()


def _is_over(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
