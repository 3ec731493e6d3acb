"""Tests the machines of a job: their names, their membership, and their messages."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import wait_for
from tests.support.processes import is_alive
from tfmulti.cluster.messages import MessageConnection
from tfmulti.errors import ConfigError
from tfmulti.launch import remote_machine
from tfmulti.launch.agent import forwarded, serve
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.connect import JoinListener, begin_of, over_ssh, remote_command
from tfmulti.launch.flags import parse
from tfmulti.launch.host_manager import limits_of, own_host_name
from tfmulti.launch.hosts import Host, discover, is_here, parse_hosts, read_hostfile, slots_of
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.membership import Absence, Limits, Standing, after, choose
from tfmulti.launch.policy import Attempt, Failure
from tfmulti.launch.remote_machine import RemoteMachine
from tfmulti.launch.workers import StartRequest

JOB = LaunchConfig(program=("x",), module=True)
SECRET = "known to both machines"


def test_hosts_of_a_flag() -> None:
    assert parse_hosts("h1:2, h2") == (Host("h1", 2), Host("h2"))
    assert parse_hosts("[fe80::1]:3,[::1]") == (Host("[fe80::1]", 3), Host("[::1]"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h1:2,h1:3", "names h1 twice"),
        ("h1:0", "Write: host:N"),
        ("h1:two", "Write: host:N"),
        ("h1:", "Write: host:N"),
        ("h1,,h2", "Write: host:N"),
        ("-oProxyCommand=x:1", "Write: host:N"),
        ("me@h1:1", "Write: host:N"),
        ("$(reboot):1", "Write: host:N"),
        ("fe80::1", "put an IPv6 address into brackets"),
    ],
)
def test_mistakes_in_hosts(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    assert words in str(caught.value)


def test_hosts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\nh1 slots=2  # the large one\nh2\n")
    assert read_hostfile(file) == (Host("h1", 2), Host("h2"))
    for text in ("h1 slots=2 max=3", "h1 2", "h1 slots=x"):
        file.write_text(f"h0\n{text}\n")
        with pytest.raises(ConfigError, match="line 2 of --hostfile"):
            read_hostfile(file)
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="names no machine"):
        read_hostfile(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "none")


def test_hosts_that_a_program_finds(tmp_path: Path) -> None:
    script = tmp_path / "find"
    script.write_text("#!/bin/sh\necho h1:2; echo; echo h2\n")
    script.chmod(0o755)
    assert discover(str(script)) == (Host("h1", 2), Host("h2"))
    script.write_text("#!/bin/sh\necho no network >&2; exit 3\n")
    with pytest.raises(ConfigError, match="exited with 3: no network"):
        discover(str(script))
    with pytest.raises(ConfigError, match="No such file"):
        discover(str(tmp_path / "none"))


def test_names_of_this_machine() -> None:
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    # RFC 5737 reserves this address for documentation, so no machine has it.
    assert not is_here("198.51.100.1")
    assert not is_here("no.such.host.invalid")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hosts", "a:1", "--hostfile", "f"], "--hosts and --hostfile both name machines"),
        (["--nnodes", "2"], "no machine is named"),
        (["--nnodes", "3:2", "--hosts", "a,b"], "Write 2:3"),
        (["--nnodes", "3", "--hosts", "a,b"], "wants 3 machines, but --hosts names 2"),
        (["--nnodes", "0", "--hosts", "a"], "must be a whole number from 1"),
        (["--node-rank", "1"], "the place of this machine in --hosts"),
        (["--node-rank", "x", "--hosts", "a"], "must be a whole number from 0"),
        (["--min-workers", "0"], "must be a whole number from 1"),
    ],
)
def test_mistakes_in_flags(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*argv, "-m", "x"], "", {})
    assert words in str(caught.value)


def test_flags_of_torchrun_on_one_machine() -> None:
    config = parse(["--nnodes", "1", "--node_rank", "0", "-m", "x"], "", {})
    assert not config.by_hand
    assert parse(["--hosts", "a,b", "--node-rank", "0", "-m", "x"], "", {}).by_hand


def test_this_machine_among_the_hosts() -> None:
    by_hand = LaunchConfig(program=("x",), module=True, hosts=(Host("a"), Host("b")), node_rank=1)
    assert own_host_name(by_hand, by_hand.hosts) == "b"
    assert own_host_name(JOB, (Host("198.51.100.1"), Host("198.51.100.2"))) is None
    assert own_host_name(JOB, (Host("localhost"),)) == "localhost"
    with pytest.raises(ConfigError, match="a name that no other machine can use"):
        own_host_name(JOB, (Host("localhost"), Host("198.51.100.1")))
    outside = LaunchConfig(program=("x",), module=True, hosts=(Host("a"),), node_rank=1)
    with pytest.raises(ConfigError, match="count from 0"):
        own_host_name(outside, outside.hosts)


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        (["--nproc-per-node", "3"], Limits(1, 1, 3)),
        (["--nproc-per-node", "3", "--min-workers", "2"], Limits(1, 10**6, 2)),
        (["--hosts", "a:2,b:1"], Limits(2, 2, 3)),
        (["--hosts", "a:2,b:1,c:4", "--nnodes", "2"], Limits(2, 2, 3)),
        (["--hosts", "a:2,b:1", "--nnodes", "1:2"], Limits(1, 2, 1)),
        (["--hosts", "a:2,b:1", "--nnodes", "1:2", "--min-workers", "2"], Limits(1, 2, 2)),
        (["--host-discovery-script", "find"], Limits(1, 10**6, 1)),
    ],
)
def test_how_many_a_job_may_have(flags: list[str], limits: Limits) -> None:
    config = parse([*flags, "-m", "x"], "", {})
    assert limits_of(config, config.hosts or (Host("127.0.0.1"),), gpus=0) == limits


def test_workers_on_a_machine() -> None:
    assert [slots_of(kind, gpus=4, cores=8) for kind in ("3", "auto", "gpu", "cpu")] == [3, 4, 4, 8]
    assert slots_of("auto", gpus=0) == 1


LIMITS = Limits(min_nodes=1, max_nodes=2, min_workers=2)


def test_which_machines_take_part() -> None:
    hosts = [("a", 1), ("b", 2), ("c", 4)]
    assert choose(hosts, Standing(), LIMITS, 0.0) == (("a", 1), ("b", 2))
    assert choose(hosts[2:], Standing(), LIMITS, 0.0) == (("c", 4),)
    assert choose(hosts[:1], Standing(), LIMITS, 0.0) is None
    assert choose(hosts, Standing(), Limits(4, 4, 1), 0.0) is None
    away = Standing(absent={"b": Absence(2, until_s=5.0)})
    assert choose(hosts, away, LIMITS, 4.0) == (("a", 1), ("c", 4))
    assert choose(hosts, away, LIMITS, 6.0) == (("a", 1), ("b", 2))
    # Without the absent machine the job could not continue, so it takes part.
    assert choose(hosts[:2], away, LIMITS, 4.0) == (("a", 1), ("b", 2))


HOSTS = {0: "a", 1: "b", 2: "b"}


def failed(rank: int) -> Attempt:
    return Attempt((Failure(rank, "", 137, 0.0),), 3)


def test_repeated_failures_lead_to_longer_absences() -> None:
    standing = Standing()
    for now, until in ((0.0, 60.0), (100.0, 220.0), (300.0, 540.0)):
        standing = after(standing, failed(1), HOSTS, progressed=False, now_s=now)
        standing = after(standing, failed(2), HOSTS, progressed=False, now_s=now)
        assert standing.absent["b"].until_s == until
        assert standing.absent["b"].workers == 1
    standing = after(standing, failed(0), HOSTS, progressed=False, now_s=400.0)
    standing = after(standing, failed(0), HOSTS, progressed=True, now_s=400.0)
    assert "a" not in standing.absent
    assert after(standing, failed(7), HOSTS, progressed=False, now_s=400.0) == standing


def test_a_notice_leaves_a_worker_out_at_once() -> None:
    one, other = (Failure(rank, "", 143, 0.0, had_notice=True) for rank in (1, 2))
    told = Failure(0, "", 143, 0.0, is_consequence=True)
    found = Attempt((told, one), 3)
    standing = after(Standing(), found, HOSTS, progressed=True, now_s=10.0)
    assert standing.absent == {"b": Absence(1, 70.0, 1)}
    both = Attempt((one, told, other), 3)
    standing = after(Standing(), both, HOSTS, progressed=True, now_s=10.0)
    assert standing.absent == {"b": Absence(2, 70.0, 2)}


def test_the_environment_that_other_machines_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    env = {"PYTHONPATH": "p", "TF_X": "1", "HOME": "h", "PATH": "b", "CUDA_VISIBLE_DEVICES": "1"}
    assert forwarded(env) == {"PYTHONPATH": "p", "TF_X": "1"}
    config = LaunchConfig(program=("x",), module=True, ssh="ssh -p 2222")
    argv = remote_command(config, "[fe80::1]")
    assert argv[:3] == ["ssh", "-p", "2222"]
    assert argv[-2] == "fe80::1"
    assert f"exec {sys.executable} -m tfmulti.launch.agent" in argv[-1].replace("'", "")


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("one", os.environ["RANK"], flush=True)
print("two", file=sys.stderr, flush=True)
# A signal just before a sleep does not shorten it.
for _ in range(600):
    time.sleep(0.1)
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[RemoteMachine, list[tuple[int, str, bytes]], int]]:
    """Yields a machine with an agent in another process, received lines, and the process id."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = LaunchConfig(program=(str(tmp_path / "script.py"),), shutdown_grace_s=1.0)
    ours, theirs = socket.socketpair()
    agent = os.fork()
    if agent == 0:
        ours.close()
        code = serve(link_of_pair(theirs), None, os.environ)
        os._exit(9 if code is None else code)
    theirs.close()
    lines: list[tuple[int, str, bytes]] = []
    begin = begin_of(config, os.environ, "127.0.0.1", f"test-{os.getpid()}")
    made = RemoteMachine(
        "127.0.0.1", link_of_pair(ours), begin, lambda *line: lines.append(line), lambda: "gone"
    )
    try:
        yield made, lines, agent
    finally:
        with contextlib.suppress(OSError):
            made.close()
        for _ in range(100):
            if os.waitpid(agent, os.WNOHANG)[0]:
                break
            time.sleep(0.05)


def link_of_pair(end: socket.socket) -> MessageConnection:
    return MessageConnection(
        end.makefile("rb"), end.makefile("wb"), lambda: end.shutdown(socket.SHUT_RDWR)
    )


def start_request(addresses: list[str]) -> StartRequest:
    return StartRequest(0, 0, 1, tuple(addresses), "run", 0, "")


def test_a_machine_behind_a_connection(
    remote: tuple[RemoteMachine, list[tuple[int, str, bytes]], int],
) -> None:
    machine, lines, _ = remote
    assert machine.cores == os.cpu_count()
    [address] = machine.reserve(1)
    assert machine.silent([address]) == [0]
    before_s = time.monotonic()
    machine.start([start_request([address])])
    wait_for(lambda: len(lines) == 2)
    assert sorted(lines) == [(0, "stderr", b"two\n"), (0, "stdout", b"one 0\n")]
    [status] = machine.statuses()
    assert status.runs
    os.kill(status.pid, signal.SIGSTOP)
    wait_for(lambda: machine.statuses()[0].frozen)
    machine.stop()
    wait_for(lambda: not machine.statuses()[0].runs)
    [status] = machine.statuses()
    assert status.returncode == 7
    assert status.ended_s is not None
    assert before_s < status.ended_s <= time.monotonic()
    machine.kill()
    assert machine.statuses() == []


def test_workers_of_a_machine_that_is_cut_off_end(
    remote: tuple[RemoteMachine, list[tuple[int, str, bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher and the agent notice it after the same time without a message."""
    machine, lines, agent = remote
    machine.start([start_request(machine.reserve(1))])
    wait_for(lambda: len(lines) == 2)
    [status] = machine.statuses()
    monkeypatch.setattr(remote_machine, "LOST_S", 0.5)
    os.kill(agent, signal.SIGSTOP)
    time.sleep(0.8)
    with contextlib.suppress(Unreachable):
        # The first call may return a status that arrived before the signal.
        machine.statuses()
    with pytest.raises(Unreachable, match="no message from it for 0"):
        machine.statuses()
    machine._connection.close()
    os.kill(agent, signal.SIGCONT)
    wait_for(lambda: not is_alive(status.pid))


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.ENOENT, ConfigError, "--ssh ssh: No such file or directory. Install OpenSSH."),
        (errno.EMFILE, Unreachable, "ssh does not start: Too many open files"),
    ],
)
def test_an_ssh_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], words: str
) -> None:
    """A lack of descriptors may be temporary, but a missing program is not."""

    def popen(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(error, match=words):
        over_ssh(JOB, {}, Host("there", 1), "run", lambda *_: None)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"h: the folder .*none does not exist here"):
        agent_in(tmp_path / "none")


def test_an_unusable_folder_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"h: the folder .*file cannot be used: Not a directory"):
        agent_in(tmp_path / "file")


def test_an_unsafe_folder_for_locks_is_reported_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"tfmulti-{os.getuid()}").touch()
    # The agent changes to the folder of the job. The next test begins where this one did.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"h: .* is not this user's own folder"):
        agent_in(tmp_path)


def agent_in(folder: Path) -> None:
    """Lets an agent begin a job in a folder, and raises the error that the launcher would raise."""
    ours, theirs = socket.socketpair()
    begin = {**begin_of(JOB, {}, "h", "r"), "folder": str(folder)}
    server = threading.Thread(target=serve, args=(link_of_pair(theirs), None, {}))
    server.start()
    try:
        RemoteMachine("h", link_of_pair(ours), begin, lambda *_: None, lambda: "")
    finally:
        server.join()


def ended_after(
    request: pytest.FixtureRequest, process: subprocess.Popen[Any]
) -> subprocess.Popen[Any]:
    """Returns a process that ends with the test, even if the test fails."""
    request.addfinalizer(process.wait)
    # The finalizer that was added last is called first.
    request.addfinalizer(process.kill)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_machine_that_waits_for_the_first_can_be_stopped(
    request: pytest.FixtureRequest, number: int, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = str(first.getsockname()[1])
        flags = ["--hosts", "127.0.0.1:1,b:1", "--node-rank", "1", "--master-port", port]
        argv = [sys.executable, "-m", "tfmulti.launch", "--insecure", *flags, "-m", "x"]
        joining = ended_after(request, subprocess.Popen(argv))
        connection, _ = first.accept()
        with connection, connection.makefile("rb") as lines:
            assert b'"name": "b"' in lines.readline()
            joining.send_signal(number)
            assert joining.wait(5) == code


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (SECRET, "tfmulti: the first machine runs another program, or has other flags (docs: "),
        (SECRET[::-1], "does not know this job's secret (TFMULTI_SECRET or --secret-file); it is "),
        ("", "tfmulti: --node-rank over 2 machines needs a secret, else whoever reaches port "),
    ],
)
def test_a_machine_that_the_first_does_not_want(
    request: pytest.FixtureRequest, secret: str, says: str
) -> None:
    hosts = "127.0.0.1:1,b:1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = parse(
        ["--hosts", hosts, "--node-rank", "0", "--master-port", str(port), "-m", "y"], ""
    )
    names = ["127.0.0.1", "b"]
    listener = JoinListener(
        dataclasses.replace(config, secret=SECRET), names[0], names, names.__contains__
    )
    request.addfinalizer(lambda: listener.close(0))
    flags = ["--hosts", hosts, "--node-rank", "1", "--master-port", str(port)]
    flags += ["--start-timeout", "1"]
    argv = [sys.executable, "-m", "tfmulti.launch", *flags, "-m", "x"]
    env = {**os.environ, "TFMULTI_SECRET": secret}
    started = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env)
    joining = ended_after(request, started)
    assert says in joining.communicate(timeout=60)[1]
    assert joining.returncode == (1 if secret == SECRET[::-1] else 2)
