"""Tests that the doctor names faults between hosts, each of which is made for real."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import networks
from tests.support.doctor import PORT, Worker, examine, on, report_of, wrong
from tests.support.networks import Hosts, program
from tests.support.processes import processes

_WHY_NOT = networks.why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

NO_TRAINING = "--training=false"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with networks.hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@contextlib.contextmanager
def firewall(hosts: Hosts, packets: str) -> Iterator[None]:
    """Drops these packets to the second host, of worker 1."""
    on(hosts, 2, "nft", "add table inet doctor")
    on(hosts, 2, "nft", "add chain inet doctor input { type filter hook input priority 0; }")
    on(hosts, 2, "nft", f"add rule inet doctor input {packets} drop")
    try:
        yield
    finally:
        on(hosts, 2, "nft", "delete table inet doctor")


def test_a_healthy_network_has_every_link(hosts: Hosts, tmp_path: Path) -> None:
    first, *others = examine(hosts, tmp_path, NO_TRAINING, "--run_dir", str(tmp_path / "run"))
    report = report_of(first)
    assert not wrong(report)
    assert [done.returncode for done in (first, *others)] == [0, 0, 0]
    pairs = {(link["from"], link["to"]) for link in report["links"]}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(link["rtt_ms"] > 0 and link["mb_s"] > 0 for link in report["links"])
    assert not (tmp_path / "run").exists()
    assert not any(done.stdout or done.stderr for done in others)


@pytest.mark.skipif(program("nft") is None, reason="nft is not installed (apt install nftables)")
def test_a_firewalled_port_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with firewall(hosts, f"tcp dport {PORT}"):
        done = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=8")
    (finding,) = wrong(report_of(done[0]))
    assert (finding["check"], finding["worker"]) == ("connection", 1)
    assert finding["measured"] == (
        f"workers 0, 2 cannot reach it at {hosts.address(2)}:{PORT}: nothing answers: a firewall "
        "drops the packets, or the machine is off"
    )
    assert f"Open the port {PORT} on {hosts.address(2)}" in finding["advice"]
    assert [each.returncode for each in done] == [1, 1, 1]


@pytest.mark.skipif(program("nft") is None, reason="nft is not installed (apt install nftables)")
def test_a_firewall_that_opens_only_the_port_of_tensorflow_is_named(
    hosts: Hosts, tmp_path: Path
) -> None:
    with firewall(hosts, f"tcp flags & (syn|ack) == syn tcp dport != {PORT}"):
        done = examine(hosts, tmp_path, NO_TRAINING)
    found = wrong(report_of(done[0]))
    assert [(f["check"], f["worker"], f["status"]) for f in found] == [
        ("free ports", 0, "warning"),
        ("free ports", 2, "warning"),
    ]
    assert f"worker 1 is not reached at {hosts.address(2)}:" in found[0]["measured"]
    assert found[0]["measured"].endswith("a port that its system has chosen: timed out")
    assert [each.returncode for each in done] == [0, 0, 0]


@contextlib.contextmanager
def slow_link(hosts: Hosts, host: int, rate: str) -> Iterator[None]:
    """Limits what a host sends."""
    limit = ["rate", rate, "burst", "32kbit", "latency", "400ms"]
    on(hosts, host, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    try:
        yield
    finally:
        on(hosts, host, "tc", "qdisc", "del", "dev", "eth0", "root")


def test_a_slow_link_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with slow_link(hosts, 3, "20mbit"):
        done = examine(hosts, tmp_path, NO_TRAINING)
    found = wrong(report_of(done[0]))
    assert [(each["check"], each["worker"], each["status"]) for each in found] == [
        ("link", 2, "warning")
    ]
    assert "to worker 0 2." in found[0]["measured"]
    # 20 Mbit/s are 2.5 MB/s.
    slow = [link["mb_s"] for link in report_of(done[0])["links"] if link["from"] == 2]
    assert all(1 < speed < 3 for speed in slow)
    assert done[0].returncode == 0


def test_a_worker_with_the_index_of_another_is_named(hosts: Hosts, tmp_path: Path) -> None:
    done = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=3", workers={1: Worker(index=2)})
    assert f"{hosts.address(3)} ({hosts.address(3)}) is not an address of this" in done[1].stderr
    assert [each.returncode for each in done] == [1, 1, 1]
    found = {(each["check"], each["worker"]): each for each in wrong(report_of(done[0]))}
    assert {("worker", 1), ("connection", 1), ("rank", 2)} <= set(found)
    assert "another program or job answers" in found["connection", 1]["measured"]


def test_names_are_resolved_on_every_worker(hosts: Hosts, tmp_path: Path) -> None:
    """One host does not know a name, and on another one it means the loopback address.

    The worker that does not know the name waits for it, and then measures a slow link. The chief
    waits for its result.
    """
    names = [f"doctor{host}" for host in (1, 2, 3)]
    addresses = [f"{name}:{PORT}" for name in names]
    lines = [f"{hosts.address(host)} {name}" for host, name in zip((1, 2, 3), names, strict=True)]
    resolved = {
        1: lines,
        2: [lines[0], lines[1]],
        3: [f"127.0.1.1 {names[1]}", lines[0], lines[2]],
    }
    files = {host: hosts.hosts_file(host) for host in resolved}
    before = {host: file.read_text() for host, file in files.items()}
    for host, file in files.items():
        file.write_text("\n".join([before[host], *resolved[host], ""]))
    try:
        with slow_link(hosts, 2, "5mbit"):
            done = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=3", addresses=addresses)
    finally:
        for host, file in files.items():
            file.write_text(before[host])
    found = {(each["check"], each["worker"]): each for each in wrong(report_of(done[0]))}
    assert "name doctor2 of worker 1 means 127.0.1.1 here" in found["loopback", 2]["measured"]
    assert "worker 1 cannot reach it at doctor3" in found["connection", 2]["measured"]
    assert "the name doctor3 does not resolve" in found["connection", 2]["measured"]


def test_a_port_that_another_program_has_is_named(hosts: Hosts, tmp_path: Path) -> None:
    code = (
        f"import socket; s = socket.create_server(('', {PORT})); print(1, flush=True); s.accept()"
    )
    taking = subprocess.Popen(
        [*hosts.inside(2), sys.executable, "-c", f"{code}; input()"],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    try:
        assert taking.stdout is not None
        taking.stdout.readline()
        done = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=3")
    finally:
        taking.kill()
        taking.communicate()
    assert f"cannot listen at {hosts.address(2)}:{PORT}: Address already in use" in done[1].stderr
    assert f"(process {taking.pid}) has it" in done[1].stderr
    assert {(each["check"], each["worker"]) for each in wrong(report_of(done[0]))} == {
        ("worker", 1),
        ("connection", 1),
    }


def test_a_worker_that_does_not_come_is_named(hosts: Hosts, tmp_path: Path) -> None:
    workers = {2: Worker(starts=False)}
    done = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=2", workers=workers)
    found = wrong(report_of(done[0]))
    assert {(each["check"], each["worker"]) for each in found} == {("worker", 2), ("connection", 2)}
    assert [each.returncode for each in done] == [1, 1]


def test_a_chief_that_does_not_come_is_named(hosts: Hosts, tmp_path: Path) -> None:
    workers = {0: Worker(starts=False), 2: Worker(starts=False)}
    (done,) = examine(hosts, tmp_path, NO_TRAINING, "--wait_s=1", workers=workers, limit_s=90)
    assert done.returncode == 1
    assert f"worker 0 ({hosts.address(1)}:{PORT}) has not answered" in done.stderr


def test_another_version_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """Worker 1 runs in a second virtual environment, with another ml_dtypes."""
    other = "0.5.3"
    assert importlib.metadata.version("ml_dtypes") != other
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    install = ["-m", "pip", "install", "-q", "--no-deps", f"ml_dtypes=={other}"]
    subprocess.run([python, *install], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "all.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    workers = {1: Worker(python=python)}
    done = examine(hosts, tmp_path, NO_TRAINING, workers=workers)
    (finding,) = wrong(report_of(done[0]))
    assert (finding["check"], finding["worker"]) == ("versions", 1)
    has = importlib.metadata.version("ml_dtypes")
    assert finding["measured"] == f"ml_dtypes {other}, but worker 0 has {has}"


def mounted(folder: Path, options: str, then: str = "true") -> list[str]:
    """Returns the words before a command that sees another disk in a folder."""
    script = f'mount -t tmpfs -o {options} tmpfs {folder} && {then} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "-"]


@pytest.mark.parametrize(
    ("options", "then", "measured"),
    [
        ("size=2m", "head -c 2m /dev/zero > {folder}/full || true", "(No space left on device)"),
        ("ro", "true", "cannot be written (Read-only file system)"),
        ("size=40m", "true", "can be written; 0.04 GiB are free"),
    ],
)
def test_a_bad_run_directory_is_named(
    hosts: Hosts, tmp_path: Path, options: str, then: str, measured: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    before = mounted(disk, options, then.format(folder=disk))
    workers = {1: Worker(before=before)}
    flags = [NO_TRAINING, "--run_dir", str(disk / "run")]
    done = examine(hosts, tmp_path, *flags, workers=workers)
    problems = wrong(report_of(done[0]))
    assert {(problem["worker"], problem["status"]) for problem in problems} == {(1, "failed")}
    assert any(measured in problem["measured"] for problem in problems)
    # The disk is worker 1's alone, so it does not see the folder of worker 0.
    assert any("does not see the run directory" in problem["measured"] for problem in problems)


def test_a_proxy_is_named_without_its_password(hosts: Hosts, tmp_path: Path) -> None:
    env = {"https_proxy": "http://me:hunter2@proxy.example:3128"}
    done = examine(hosts, tmp_path, NO_TRAINING, workers={2: Worker(env=env)})
    (finding,) = wrong(report_of(done[0]))
    assert (finding["check"], finding["worker"]) == ("proxies", 2)
    assert "https_proxy (proxy.example)" in finding["measured"]
    assert "hunter2" not in "".join(each.stdout + each.stderr for each in done)


def test_a_straggler_is_named(hosts: Hosts, tmp_path: Path) -> None:
    addresses = [f"{hosts.address(host)}:{PORT}" for host in (1, 2)]
    workers = {1: Worker(is_slowed=True)}
    done = examine(
        hosts, tmp_path, "--model=cnn", workers=workers, addresses=addresses, limit_s=300
    )
    found = [each for each in wrong(report_of(done[0])) if each["check"] == "straggler"]
    assert [each["worker"] for each in found] == [1], report_of(done[0])
    assert f"{addresses[1]} computes a step in" in found[0]["measured"]


def test_the_launcher_runs_it_on_hosts_over_ssh(hosts: Hosts, tmp_path: Path) -> None:
    """The launcher starts a worker on each host, and the devices are tried by training."""
    named = ",".join(f"{hosts.address(host)}:1" for host in (1, 2))
    launch = ["-m", "tfmulti.launch", "--hosts", named, "--ssh", hosts.ssh()]
    with processes(tmp_path / "launcher") as group:
        flags = ["-m", "tfmulti.doctor", "--json", "--run_dir", str(tmp_path / "run")]
        group.start([*launch, *flags], before=hosts.inside(1), cwd=tmp_path)
        (done,) = group.wait(240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run/logs/attempt_0/worker_0/stdout.log").read_text())
    assert report["workers"] == 2
    assert {(link["from"], link["to"]) for link in report["links"]} == {(0, 1), (1, 0)}
    assert [f for f in wrong(report) if f["check"] != "throughput"] == []
    found = {each["check"]: each for each in report["findings"]}
    assert "the workers prove that they know" in found["secret"]["measured"]
    assert found["numbers"]["measured"].startswith("the losses of one device and of 2 differ by")
    assert done.stderr.count("waiting") == 1
