"""Tests that a job whose ports are attacked all the time ends with the same numbers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.launcher_without_threads import NO_THREADS
from tests.support.launching import (
    LIMIT_S,
    argv,
    assert_the_same_within_rounding,
    has_checkpoint,
    wait_for,
)
from tests.support.processes import listening_in, processes
from tfmulti.cluster.handshake import HandshakeError, authenticate
from tfmulti.cluster.messages import TcpMessageConnection

pytestmark = pytest.mark.processes

SECRET = "known on both machines"
# Both addresses belong to this machine.
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
AT_ONCE = 100


def test_strangers_at_all_ports_change_nothing(
    tmp_path: Path, whole: dict[str, np.ndarray]
) -> None:
    """At first an attacker listens where the second machine expects the first one."""
    env = {"TFMULTI_SECRET": SECRET, "TFMULTI_TEST_STEP_S": "0.3"}
    imposter = socket.create_server((FIRST, 0))
    port = imposter.getsockname()[1]
    flags = ["--hosts", f"{FIRST}:1,{SECOND}:1", "--master-port", str(port), "--node-rank"]
    with processes(tmp_path / "launchers") as group, contextlib.ExitStack() as at_end:
        second = group.start(argv(tmp_path, "", *flags, "1"), env)
        give_orders(imposter, tmp_path / "escaped")
        wait_for(lambda: "does not know this job's secret" in group.errors(0))
        first = group.start(argv(tmp_path, "", *flags, "0"), env)
        wait_for(lambda: has_checkpoint(tmp_path))
        ports = listening(first.pid) | listening(second.pid)
        assert (FIRST, port) in ports
        # Besides the launcher's port, each worker has a port of TensorFlow's server.
        assert len(ports) >= 3
        attacked = [
            at_end.enter_context(without_end(attack, place))
            for place in sorted(ports)
            for attack in ATTACKS
        ]
        later, earlier = group.wait(LIMIT_S)
    assert [earlier.returncode, later.returncode] == [0, 0], earlier.stderr + later.stderr
    assert min(len(tries) for tries in attacked) >= 2
    assert not (tmp_path / "escaped").exists()
    assert "starting all workers again" not in earlier.stderr
    assert_the_same_within_rounding(tmp_path, whole)


@pytest.mark.parametrize("lacking", ["files", "threads"])
def test_a_launcher_that_lacks_files_or_threads_ends_with_the_same_numbers(
    lacking: str, tmp_path: Path, whole: dict[str, np.ndarray]
) -> None:
    """Strangers connect all the time, and send their handshakes byte by byte."""
    no_threads = tmp_path / "no-threads"
    env = {"TFMULTI_SECRET": SECRET, "TFMULTI_TEST_STEP_S": "0.5", NO_THREADS: str(no_threads)}
    with socket.create_server((FIRST, 0)) as free:
        master = free.getsockname()
    flags = ["--hosts", f"{FIRST}:1,{SECOND}:1", "--master-port", str(master[1]), "--node-rank"]
    _, _, *rest = argv(tmp_path, "", *flags, "0")
    with processes(tmp_path / "launchers") as group, contextlib.ExitStack() as at_end:
        first = group.start(["-m", "tests.support.launcher_without_threads", *rest], env)
        group.start(argv(tmp_path, "", *flags, "1"), env)
        wait_for(lambda: has_checkpoint(tmp_path))
        assert may_come_in(master)
        if lacking == "files":
            # What is open stays so, and no file or connection can be opened any more.
            resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (3, 3))
            # The system has taken the descriptor of the next connection already.
            may_come_in(master)
        else:
            no_threads.touch()
        assert not may_come_in(master)
        attacked = [
            at_end.enter_context(without_end(attack, master))
            for attack in (byte_by_byte, many_at_once, nonsense)
        ]
        earlier, later = group.wait(LIMIT_S)
    assert [earlier.returncode, later.returncode] == [0, 0], earlier.stderr + later.stderr
    assert all(attacked)
    assert "starting all workers again" not in earlier.stderr
    assert_the_same_within_rounding(tmp_path, whole)


def give_orders(imposter: socket.socket, path: Path) -> None:
    """Answers the second machine as a launcher would, without the secret."""
    orders = [
        {"begin": {"name": SECOND, "run_id": "../../x", "folder": "/", "env": {"PATH": "/"}}},
        {"do": "start", "id": 1, "with": [[{"rank": 0, "folder": str(path)}]]},
        {"do": "_here.kill", "id": 2},
        {"fails": "the job has ended"},
        {"ended": 0},
    ]
    with imposter:
        for order in orders:
            with contextlib.suppress(OSError):
                caller, _ = imposter.accept()
                with caller:
                    caller.recv(1000)
                    caller.sendall(json.dumps(order).encode() + b"\n")


def listening(ancestor: int) -> set[tuple[str, int]]:
    """Returns the addresses at which a process and its children listen."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text()
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    family = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    inodes = set()
    for pid in family:
        for number in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(number)))
    found = set()
    for name in ("tcp", "tcp6"):
        for host, port, inode in listening_in(Path(f"/proc/net/{name}").read_text()):
            if inode in inodes:
                found.add((FIRST if name == "tcp6" or host == "0.0.0.0" else host, port))
    return found


Place = tuple[str, int]


def call(place: Place) -> socket.socket:
    caller = socket.create_connection(place, 2)
    caller.settimeout(2)
    return caller


def nonsense(place: Place) -> None:
    for data in (
        os.urandom(4000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95cos\nsystem\n",
        b'{"hello": {}}\n',
        b'{"line": ["../../x", "stdout", "x"]}\n',
        b"[" * 60_000 + b"\n",
        bytes(100),
    ):
        with call(place) as caller:
            caller.sendall(data)


def byte_by_byte(place: Place) -> None:
    """Keeps all places for handshakes, until they have lasted too long."""
    handshake = b'{"name": "' + SECOND.encode() + b'", "nonce": "' + b"0" * 32 + b'"}\n'
    with contextlib.ExitStack() as at_end:
        callers = [at_end.enter_context(call(place)) for _ in range(AT_ONCE)]
        for byte in handshake:
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.sendall(bytes([byte]))
            time.sleep(0.02)


def may_come_in(place: Place) -> bool:
    """Returns whether a port answers a caller that knows the secret."""
    try:
        with call(place) as caller:
            authenticate(TcpMessageConnection(caller), SECRET.encode(), SECOND)
    except OSError:
        return False
    return True


def an_endless_line(place: Place) -> None:
    with call(place) as caller:
        for _ in range(100):
            caller.sendall(b"x" * 100_000)


def many_at_once(place: Place) -> None:
    with contextlib.ExitStack() as callers:
        for _ in range(AT_ONCE):
            callers.enter_context(call(place))
        time.sleep(0.5)


def without_the_secret(place: Place) -> None:
    """Calls by the name of a machine and by that of a rank, of which each port knows one."""
    for name in (SECOND, "1"):
        with call(place) as caller, contextlib.suppress(OSError), pytest.raises(HandshakeError):
            authenticate(TcpMessageConnection(caller), b"another secret, a guess", name)


def as_another_worker(place: Place) -> None:
    for rank in range(3):
        with call(place) as caller:
            caller.sendall(os.urandom(16) + rank.to_bytes(4, "little") + bytes(32))
            caller.recv(100)


ATTACKS = (
    nonsense,
    byte_by_byte,
    an_endless_line,
    many_at_once,
    without_the_secret,
    as_another_worker,
)


@contextlib.contextmanager
def without_end(attack: Callable[[Place], None], place: Place) -> Iterator[list[float]]:
    """Attacks repeatedly in a thread, and yields the times at which the attempts ended."""
    over, tries = threading.Event(), list[float]()

    def go_on() -> None:
        while not over.is_set():
            # The attacked process may close the connection at any time.
            with contextlib.suppress(OSError):
                attack(place)
            tries.append(time.monotonic())
            over.wait(0.1)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield tries
    finally:
        over.set()
        thread.join()
