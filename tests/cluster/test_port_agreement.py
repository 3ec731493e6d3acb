"""Tests how processes agree on their addresses, by threads with real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tfmulti.cluster import port_agreement
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.layout import Layout
from tfmulti.errors import ClusterError, ConfigError

_jobs = itertools.count()
EXPORT = "export TFMULTI_SECRET=$(python -c 'import secrets; print(secrets.token_hex())')"


def layouts(size: int, **changed: Any) -> list[Layout]:
    """Returns the layouts of a job on this machine, whose ports no other job uses."""
    job = f"test {os.getpid()} {next(_jobs)}"
    local = ("127.0.0.1",)
    return [
        dataclasses.replace(
            Layout("slurm", rank, size, rank, size, local[0], local, job, local * size), **changed
        )
        for rank in range(size)
    ]


def agree(
    jobs: list[Layout], envs: list[dict[str, str]] | None = None, **options: Any
) -> list[Future[Cluster]]:
    """Returns the cluster that each process gets, or raises the error of a process."""
    given = envs or [{}] * len(jobs)
    gpus = options.pop("gpus", [0] * len(jobs))
    options = {"timeout_s": 20.0, **options}
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [
            pool.submit(port_agreement.agree, job, env, gpus=count, **options)
            for job, env, count in zip(jobs, given, gpus, strict=True)
        ]


@contextlib.contextmanager
def taken(*ports: int) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def test_all_get_the_same_addresses_and_their_own_rank() -> None:
    jobs = layouts(3)
    found = [future.result() for future in agree(jobs)]
    assert [cluster.rank for cluster in found] == [0, 1, 2]
    assert len({cluster.addresses for cluster in found}) == 1
    planned = jobs[0].planned
    assert planned is not None
    assert found[0].addresses == planned.addresses
    assert [(cluster.local_rank, cluster.local_size) for cluster in found] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


def test_ports_that_are_taken_are_replaced() -> None:
    jobs = layouts(3)
    first_of_chief = jobs[0].port(1000)
    with taken(jobs[0].port(1), first_of_chief):
        found = [future.result() for future in agree(jobs)]
    addresses = found[0].addresses
    assert all(cluster.addresses == addresses for cluster in found)
    assert str(jobs[0].port(1)) not in addresses[1]
    assert len(set(addresses)) == 3
    # A firewall may let these ports pass, and no others.
    assert all(10_000 <= int(address.rpartition(":")[2]) < 30_000 for address in addresses)


def test_a_job_without_a_free_port_says_so() -> None:
    (job,) = layouts(1)
    first = job.port(1000)
    for ports, words in (
        (range(0, 20_000, 2000), "none of the 10 ports of process 0 is free"),
        (range(1000, 1008), f"none of the 8 ports from {first} on is free"),
    ):
        with taken(*map(job.port, ports)), pytest.raises(ClusterError, match=words):
            port_agreement.agree(job, {})


def test_a_process_without_the_secret_is_kept_out() -> None:
    jobs = layouts(2)
    secret = {"TFMULTI_SECRET": "x" * 32}
    assert [f.result().rank for f in agree(jobs, [secret, secret])] == [0, 1]
    chief, other = agree(layouts(2), [secret, {}], timeout_s=2.0)
    with pytest.raises(
        ClusterError, match=r"1 of 2 processes have not connected within 2 s \(ranks 1"
    ):
        chief.result()
    with pytest.raises(ClusterError, match="another program or job answers"):
        other.result()


def test_an_invalid_secret_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="a secret has 16 to"):
        port_agreement.agree(layouts(2)[0], {"TFMULTI_SECRET": "short"})


def test_a_process_that_does_not_come_is_named() -> None:
    chief, second, _ = layouts(3)
    words = r"1 of 3 processes have not connected within 1 s \(ranks 2\)\. Did they start"
    futures = agree([chief, second], timeout_s=1.0)
    with pytest.raises(ClusterError, match=words):
        futures[0].result()


def test_a_chief_that_is_not_there_is_named() -> None:
    _, second = layouts(2)
    words = "process 1 has not reached process 0 on 127.0.0.1 within 1 s"
    with pytest.raises(ClusterError, match=words):
        port_agreement.agree(second, {}, timeout_s=1.0)
    nowhere = dataclasses.replace(second, chief_hosts=("no-such-host.invalid",))
    with pytest.raises(ClusterError, match=r"on no-such-host\.invalid within 1 s"):
        port_agreement.agree(nowhere, {}, timeout_s=1.0)


def test_another_job_at_the_same_port_is_ignored() -> None:
    jobs, others = layouts(2), layouts(2)
    with taken(jobs[0].port(1000)):
        found = [future.result() for future in agree(jobs + others)]
    assert found[0].addresses == found[1].addresses != found[2].addresses


@pytest.mark.parametrize(
    ("sender", "before", "after"),
    [("process", b'"gpus": 0', b'"gpus": 1'), ("chief", b'"addresses"', b'"error": "x", "y"')],
)
def test_a_message_that_is_changed_on_the_way_is_not_taken(
    sender: str, before: bytes, after: bytes
) -> None:
    """An attacker between the two holds the first port, and sends everything else on."""
    jobs, seen = layouts(2), threading.Event()

    def send_on(source: socket.socket, target: socket.socket, changes: bool) -> None:
        with contextlib.suppress(OSError):
            for line in source.makefile("rb"):
                if changes and before in line:
                    seen.set()
                    line = line.replace(before, after)
                target.sendall(line)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def between() -> None:
        with server, contextlib.suppress(OSError):
            process, _ = server.accept()
            deadline_s = time.monotonic() + 10
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    chief = socket.create_connection(("127.0.0.1", jobs[0].port(1001)), 5)
                    break
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            # Until now it kept the chief away from the first port, and now it lets the process by.
            server.close()
            back = threading.Thread(target=send_on, args=(chief, process, sender == "chief"))
            back.start()
            send_on(process, chief, sender == "process")
            back.join()
            process.close()
            chief.close()

    server = socket.create_server(("127.0.0.1", jobs[0].port(1000)))
    attacker = threading.Thread(target=between)
    attacker.start()
    chief, other = agree(jobs, timeout_s=3.0)
    attacker.join()
    assert seen.is_set()
    assert chief.result().addresses
    if sender == "process":
        # The chief has dropped that connection, and the process has called again.
        assert other.result() == chief.result().for_rank(1)
    else:
        with pytest.raises(ClusterError, match="a message was changed on its way"):
            other.result()


@pytest.mark.parametrize("environment", ["slurm", "lsf", "azureml", "mpi"])
def test_a_job_on_one_host_listens_on_loopback_alone(environment: str) -> None:
    host = socket.gethostname()
    named = {"host": host, "chief_hosts": (host,), "hosts": (host,) * 2}
    jobs = layouts(2, environment=environment, **named)
    assert found_listening(jobs) == {"127.0.0.1"}
    # Azure ML and LSF let a process guess how many others its host has.
    guessed = [dataclasses.replace(jobs[0], local_size=1), jobs[1]]
    assert "127.0.0.1" not in found_listening(guessed)
    # So a process tries the host of process 0, too.
    tried = list(port_agreement._candidates(jobs[1]))
    assert tried[:2] == [(name, jobs[1].port(1000)) for name in ("127.0.0.1", host)]


def found_listening(jobs: list[Layout]) -> set[str]:
    """Lets the processes agree, and returns the addresses at which the chief has listened."""
    found: set[str] = set()
    create = socket.create_server

    def noted(address: Any, **options: Any) -> socket.socket:
        found.add(address[0] or "all")
        return create(address, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", noted)
        assert [future.result().rank for future in agree(jobs)] == [0, 1]
    return found


@pytest.mark.parametrize(
    ("environment", "step"),
    [
        ("slurm", f"Run this once, in the shell that starts the job: {EXPORT}"),
        ("mpi", f"{EXPORT} and give Open MPI's mpirun -x TFMULTI_SECRET."),
        ("azureml", "Set it to a random text in environment_variables of the job."),
    ],
)
def test_a_job_on_several_hosts_without_a_secret_is_warned(
    environment: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agree(layouts(2, environment=environment, local_size=1, local_rank=0))
    (line,) = capsys.readouterr().err.splitlines()
    assert "the processes run on several hosts without TFMULTI_SECRET" in line
    assert line.endswith(step)
    agree(layouts(2, local_size=1, local_rank=0), [{"TFMULTI_SECRET": "x" * 32}] * 2)
    agree(layouts(2))
    assert capsys.readouterr().err == ""


def test_different_numbers_of_gpus_are_an_error_on_all() -> None:
    words = "process 0 has 2 GPUs for itself, but process 1 has 1"
    for future in agree(layouts(2), gpus=[2, 1]):
        with pytest.raises(ClusterError, match=words):
            future.result()
