"""Tests that strangers at the launcher's port and connections cost a job at most a line."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.callers import (
    HOST,
    NONCE,
    SECRET,
    START_REQUEST,
    MasterPort,
    StubMachine,
    is_closed,
    knock,
)
from tests.support.launching import wait_for
from tfmulti.cluster import handshake
from tfmulti.cluster.job_secret import MessageAuthenticator, secret_of
from tfmulti.cluster.messages import MOST_BYTES, MessageConnection, TcpMessageConnection
from tfmulti.distribution.transport import rendezvous
from tfmulti.errors import ConfigError
from tfmulti.launch import agent, connect, guard
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.connect import remote_command
from tfmulti.launch.flags import parse
from tfmulti.launch.host_manager import HostManager, check_secret
from tfmulti.launch.hosts import Host, parse_hosts
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.remote_machine import RemoteMachine

pytestmark = pytest.mark.processes


@pytest.fixture
def port() -> Iterator[MasterPort]:
    master_port = MasterPort()
    yield master_port
    master_port.close()


def test_a_caller_without_the_secret_is_reported(port: MasterPort) -> None:
    """The launcher reports only the callers with the name of a machine that it expects."""

    def call_without_the_secret() -> None:
        connection = TcpMessageConnection(knock(port.port))
        connection.send({"name": "b", "nonce": NONCE})
        connection.receive()
        connection.send({"proof": "00" * 32})
        assert connection.receive() is None

    call_without_the_secret()
    for reason in ("has not been started there", "does not know the job's secret"):
        with pytest.raises(Unreachable, match=reason):
            port.listener.accept_machine(Host("b"), {}, "r", lambda *line: None)
        call_without_the_secret()
    assert port.comes_in()


def test_recorded_messages_prove_nothing(port: MasterPort) -> None:
    """A message can neither be repeated nor sent back to its sender."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        ours = TcpMessageConnection(knock(between.getsockname()[1]))
        caller = threading.Thread(target=handshake.authenticate, args=(ours, port.key, "b"))
        caller.start()
        near, _ = between.accept()
        far, from_near = knock(port.port), near.makefile("rb")
        said.append(from_near.readline())
        far.sendall(said[0])
        near.sendall(far.makefile("rb").readline())
        said.append(from_near.readline())
        caller.join()
    assert b'"proof"' in said[1]
    far.close()
    with knock(port.port, said[0]) as again:
        answer = json.loads(again.makefile("rb").readline())
        again.sendall(said[1])
        assert is_closed(again)
    with knock(port.port, said[0]) as again:
        again.makefile("rb").readline()
        again.sendall(json.dumps({"proof": answer["proof"]}).encode() + b"\n")
        assert is_closed(again)
    assert port.comes_in()


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "x"), OSError(errno.ECONNABORTED, "x")])
def test_workers_connect_although_an_accept_fails(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    places = [each.getsockname() for each in listeners]
    original, failures = socket.socket.accept, [error, error]

    def accept(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return original(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with ThreadPoolExecutor(2) as threads:
        found = [
            threads.submit(rendezvous.connect_workers, listener, rank, places, b"key")
            for rank, listener in enumerate(listeners)
        ]
        links = [connection for each in found for connection in each.result(20).values()]
    assert len(links) == 2
    for connection in links:
        connection.close()


def test_a_guard_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_of_test = guard.Guard(1.0)
    os.kill(guard_of_test._pid, signal.SIGKILL)
    tried: list[Any] = []

    def fails(*args: Any, **kwargs: Any) -> None:
        tried.append(args)
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(guard.subprocess, "Popen", fails)
    wait_for(lambda: guard_of_test.check() or len(tried) >= 2)
    monkeypatch.undo()
    guard_of_test.check()
    assert guard_of_test._replacement is not None
    assert guard_of_test._replacement.poll() is None
    guard_of_test.close()


def test_callers_with_names_of_no_machine_do_not_wait(port: MasterPort) -> None:
    """Without a secret, as with --insecure, anyone may call under any name."""
    callers = [TcpMessageConnection(knock(port.port)) for _ in range(20)]
    for number, caller in enumerate(callers):
        handshake.authenticate(caller, port.key, f"x{number}")
        caller.send({"program": "\0".join(port.program)})
        caller.limit(10)
    for caller in callers:
        assert caller.receive() is None
        caller.close()
    assert not port.listener._waiting
    assert port.comes_in()


def test_a_job_of_one_machine_opens_no_master_port() -> None:
    """It would take a port in use for an error."""
    with socket.create_server((HOST, 0)) as used:
        port = str(used.getsockname()[1])
        words = ["--hosts", f"{HOST}:1", "--node-rank", "0", "--master-port", port, "-m", "x"]
        HostManager(parse(words, ""), {}, "r", lambda *_: None, lambda _: None).close(0)
        words[1] = f"{HOST}:1,b:1"
        config = replace(parse(words, ""), secret=SECRET)
        with pytest.raises(ConfigError, match="in use"):
            HostManager(config, {}, "r", lambda *_: None, lambda _: None)


def test_a_host_file_that_may_grow_needs_a_secret(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    one = LaunchConfig(program=("x",), module=True, node_rank=0, hostfile=tmp_path / "hosts")
    with pytest.raises(ConfigError, match="--node-rank over 1 machines or more needs a secret"):
        check_secret(one, parse_hosts("127.0.0.1:1"))
    check_secret(replace(one, secret=SECRET), parse_hosts("127.0.0.1:1"))


def test_a_secret_is_text() -> None:
    with pytest.raises(ConfigError, match="a secret has letters, digits and signs alone"):
        secret_of({"TFMULTI_SECRET": "sixteen or more \udcff"})


def test_a_silent_first_machine_is_reported(tmp_path: Path) -> None:
    """The kernel accepts connections for a stopped launcher, so a joining machine needs a limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        flags = ["--hosts", "127.0.0.1:1,b:1", "--node-rank", "1", "--master-port", port]
        argv = [sys.executable, "-m", "tfmulti.launch", *flags, "--start-timeout", "1", "-m", "x"]
        env = {**os.environ, "TFMULTI_SECRET": SECRET}
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert "has not answered for 1 s (it does not start the job)" in done.stderr


@pytest.mark.parametrize(
    "answer", [{}, {"gives": None}, {"gives": 3}, {"gives": ["h:1"]}, {"gives": [0, "x", 9]}]
)
@pytest.mark.parametrize("ask", ["reserve", "silent", "stacks"])
def test_an_answer_of_another_form_is_no_answer(answer: dict[str, Any], ask: str) -> None:
    ours, theirs = over_pair()
    with theirs.makefile("rwb") as agents:
        agents.write(b'{"hello": {"cores": 1, "gpus": 0}}\n')
        agents.flush()
        machine = remote_machine(ours, [])
        agents.write(json.dumps({"id": 1, **answer}).encode() + b"\n")
        agents.flush()
        arguments: list[Any] = {"reserve": [3], "silent": [["h:1", "h:2"]], "stacks": []}[ask]
        with pytest.raises(Unreachable, match="is not an agent of tfmulti, or has another version"):
            getattr(machine, ask)(*arguments)
        machine.close()


def test_an_answer_without_the_secret_gets_no_proof() -> None:
    """A program that took the first machine's port learns only the machine's name."""
    for answer in ({}, {"nonce": NONCE}, {"nonce": NONCE, "proof": "00" * 32}):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ours = TcpMessageConnection(knock(taken.getsockname()[1]))
            theirs, _ = taken.accept()
        theirs.sendall(json.dumps(answer).encode() + b"\n")
        with pytest.raises(handshake.HandshakeError):
            handshake.authenticate(ours, SECRET.encode(), "b")
        heard = theirs.recv(10_000)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            # The caller has sent nothing more.
            theirs.recv(1)
        assert set(json.loads(heard)) == {"name", "nonce"}
        assert SECRET.encode() not in heard


def signing_pair() -> tuple[MessageConnection, MessageConnection, socket.socket, socket.socket]:
    """Returns two ends that sign, and the sockets of an attacker between them."""
    (one, from_one), (two, to_two) = over_pair(), over_pair()
    one.authenticator = MessageAuthenticator(b"1", b"2")
    two.authenticator = MessageAuthenticator(b"2", b"1")
    return one, two, from_one, to_two


@pytest.mark.parametrize("tampering", ["changed", "left out", "repeated", "swapped", "unsigned"])
def test_a_message_changed_on_the_way_ends_the_connection(tampering: str) -> None:
    one, two, from_one, to_two = signing_pair()
    lines = []
    with from_one.makefile("rb") as heard:
        for number in range(3):
            one.send({"do": number})
            lines.append(heard.readline())
    good = {"changed": 1, "left out": 1, "repeated": 2, "swapped": 0, "unsigned": 0}[tampering]
    passed = {
        "changed": [lines[0], lines[1].replace(b"1}", b"7}")],
        "left out": [lines[0], lines[2]],
        "repeated": [lines[0], lines[1], lines[1]],
        "swapped": [lines[1], lines[0]],
        "unsigned": [b'{"do": 0}\n'],
    }[tampering]
    to_two.sendall(b"".join(passed))
    assert [two.receive() for _ in range(good)] == [{"do": number} for number in range(good)]
    assert two.receive() is None


def test_signed_messages_pass_in_both_directions() -> None:
    one, two, from_one, to_two = signing_pair()
    one.send({"a": 1})
    one.send({"a": 2})
    to_two.sendall(from_one.recv(1000))
    assert [two.receive(), two.receive()] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("short", 0o600, "a secret has 16 to 4096 characters, but this has 5"),
        ("", 0o600, "but this has 0"),
        ("x" * 5000, 0o600, "a secret has 16 to 4096"),
        (SECRET, 0o644, r"can be read or written by others \(mode 0644\)\. Run: chmod 600"),
        (SECRET, 0o620, "can be read or written by others"),
    ],
)
def test_a_secret_file_is_this_users_alone(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        secret_of({}, path)


def test_where_a_secret_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    assert secret_of({}, path) == secret_of({"TFMULTI_SECRET": SECRET}) == SECRET
    assert secret_of({}) == secret_of({"TFMULTI_SECRET": ""}) == ""
    with pytest.raises(ConfigError, match="both given"):
        secret_of({"TFMULTI_SECRET": SECRET}, path)
    with pytest.raises(ConfigError, match="TFMULTI_SECRET: a secret has 16"):
        secret_of({"TFMULTI_SECRET": "short"})
    for other in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is not a file|Is a directory|No such file"):
            secret_of({}, other)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="is not a file"):
        secret_of({}, tmp_path / "fifo")


def test_the_secret_is_in_no_message_and_no_repr() -> None:
    config = LaunchConfig(
        program=MasterPort.program,
        module=True,
        hosts=parse_hosts("a,b"),
        node_rank=0,
        secret=SECRET,
    )
    begin = connect.begin_of(config, {"TFMULTI_SECRET": SECRET}, "b", "r")
    assert SECRET not in json.dumps(begin) + repr(config)
    over_ssh = connect.begin_of(
        LaunchConfig(program=MasterPort.program, module=True), {"TFMULTI_SECRET": SECRET}, "b", "r"
    )
    assert over_ssh["env"]["TFMULTI_SECRET"] == SECRET


def over_pair() -> tuple[MessageConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    return MessageConnection(ours.makefile("rb"), ours.makefile("wb"), ours.close), theirs


@pytest.mark.parametrize(
    "hello", [{}, None, [], "x", {"cores": 1}, {"cores": "1", "gpus": 0}, {"cores": -1, "gpus": 0}]
)
def test_an_agent_without_a_valid_hello_is_unreachable(hello: Any) -> None:
    """The launcher tries it again later, like any machine that does not answer."""
    connection, theirs = over_pair()
    theirs.sendall(json.dumps({"hello": hello}).encode() + b"\n")
    with pytest.raises(Unreachable, match="not an agent"):
        remote_machine(connection, [])


def remote_machine(connection: MessageConnection, lines: list[Any]) -> RemoteMachine:
    """Returns a machine with the worker of rank 0, whose lines are added to a list."""
    remote = RemoteMachine("b", connection, {}, lambda *line: lines.append(line), lambda: "")
    remote._ranks = {0}
    return remote


STATUS = {"pid": 1, "returncode": None, "ended_s": None, "heartbeat": None, "error": None}


@pytest.mark.parametrize(
    "message",
    [
        {"line": ["../../../escaped", "stdout", "x"]},
        {"line": [7, "stdout", "x"]},
        {"line": [0, "../stdout", "x"]},
        {"line": [0, "stdout"]},
        {"line": [0, "stdout", "\u0394"]},
        {"line": 3},
        {"statuses": [{"rank": "../x", **STATUS}], "now_s": 1.0},
        {"statuses": [{"rank": 0, "more": 1, **STATUS}], "now_s": 1.0},
        {"statuses": [{"rank": 0}], "now_s": 1.0},
        {"statuses": 3, "now_s": 1.0},
        {"statuses": [], "now_s": "late"},
    ],
)
def test_a_message_of_another_form_ends_the_connection(message: Any) -> None:
    connection, theirs = over_pair()
    lines: list[Any] = []
    theirs.sendall(b'{"hello": {"cores": 2, "gpus": 0}}\n')
    remote = remote_machine(connection, lines)
    theirs.sendall(json.dumps(message).encode() + b"\n")
    wait_for(lambda: remote._ended)
    with pytest.raises(Unreachable):
        remote.stop()
    assert lines == []
    remote.close()


def test_lines_of_workers_come_through() -> None:
    connection, theirs = over_pair()
    lines: list[Any] = []
    theirs.sendall(b'{"hello": {"cores": 2, "gpus": 0}}\n')
    remote = remote_machine(connection, lines)
    theirs.sendall(b'{"line": [0, "stderr", "x"]}\n')
    wait_for(lambda: lines == [(0, "stderr", b"x")])
    remote.close()


def answer_to(request: dict[str, Any], machine: StubMachine, folder: Path) -> dict[str, Any]:
    connection, theirs = over_pair()
    agent.Agent(connection, machine, folder)._handle(request)  # type: ignore[arg-type]
    answer: dict[str, Any] = json.loads(theirs.makefile().readline())
    return answer


@pytest.mark.parametrize(
    "message",
    [
        {"do": "danger"},
        {"do": "__class__"},
        {"do": "secret"},
        {"do": "statuses"},
        {"do": None},
        {},
        {"do": ["start"]},
        {"do": "reserve"},
        {"do": "reserve", "with": ["2"]},
        {"do": "reserve", "with": {"a": 1}},
        {"do": "start", "with": [[{**START_REQUEST, "rank": "../../x"}]]},
        {"do": "start", "with": [[{}]]},
        {"do": "start", "with": [3]},
    ],
)
def test_an_agent_handles_only_known_requests(tmp_path: Path, message: dict[str, Any]) -> None:
    machine = StubMachine()
    answer = answer_to({"id": 5, **message}, machine, tmp_path)
    assert (answer["id"], "fails" in answer) == (5, True)
    assert machine.calls == []


def test_a_start_request_stays_in_the_agents_folder(tmp_path: Path) -> None:
    machine = StubMachine()
    assert (
        answer_to({"do": "reserve", "id": 1, "with": [2]}, machine, tmp_path)["gives"]
        == ["h:1"] * 2
    )
    answer_to({"do": "start", "id": 2, "with": [[START_REQUEST]]}, machine, tmp_path)
    count, [request] = machine.calls
    assert count == 2
    assert request.folder == str(tmp_path / "attempt_2" / "worker_1")


@pytest.mark.parametrize("name", ["[-F/tmp/x]", "[-oProxyCommand]", "[::1", "a]", "[a.b]:2"])
def test_brackets_hold_an_address(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a host|only an IPv6 address may stand"):
        parse_hosts(name)


def test_a_host_is_no_flag_of_sshs() -> None:
    assert parse_hosts("[fe80::1%eth0]:2") == (Host("[fe80::1%eth0]", 2),)
    argv = remote_command(LaunchConfig(program=MasterPort.program, module=True), "[::1]")
    assert argv[argv.index("--") + 1] == "::1"


def test_an_agents_lock_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.tempfile, "gettempdir", lambda: str(tmp_path))
    folder, target = tmp_path / f"tfmulti-{os.getuid()}", tmp_path / "target"
    target.write_text("precious")
    with agent._lock_of_job("../run/1-host") as lock:
        assert lock.parent == folder
        assert (folder.stat().st_mode & 0o777, lock.stat().st_mode & 0o777) == (0o700, 0o600)
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"), agent._lock_of_job("../run/1-host"):
        pass
    assert target.read_text() == "precious"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not this user's own folder"), agent._lock_of_job("x"):
        pass


def test_long_lines_of_a_connection_have_an_end() -> None:
    connection, theirs = over_pair()
    connection.most_bytes = 10
    theirs.sendall(b'{"a": 1}\n{"b": 123456789}\n')
    assert connection.receive() == {"a": 1}
    assert connection.receive() is None
    assert MOST_BYTES == 1 << 24
