"""Jobs over several hosts, and jobs whose workers come and go."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import networks
from tests.support.launching import (
    LIMIT_S,
    argv,
    assert_the_same_within_rounding,
    has_checkpoint,
    wait_for,
)
from tests.support.networks import Hosts
from tests.support.processes import Processes, listening_in, processes

pytestmark = pytest.mark.hosts

WHY_NOT = networks.why_not()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SLOW_STEPS = {"TFMULTI_TEST_STEP_S": "0.7"}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "network"
    folder.mkdir()
    with networks.hosts(2, folder) as made:
        yield made


def listening(hosts: Hosts, host: int, port: int) -> list[str]:
    """Returns the addresses at which something listens on a host (proc_pid_net(5))."""
    found = []
    for name in ("tcp", "tcp6"):
        argv = [*hosts.inside(host), "cat", f"/proc/net/{name}"]
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        found += [address for address, at, _ in listening_in(text) if at == port]
    return found


def says(group: Processes, words: str) -> None:
    """Waits until the first launcher says something."""
    wait_for(lambda: words in group.errors(0), 60)


ANOTHER_PROCESS = """
import os, pathlib, sys
# Processes of two containers may have the same number.
os.getpid = lambda: int(sys.argv[1])
from tests.support.networks import Hosts
networks = [Hosts(1, pathlib.Path(".")) for _ in range(5)]
print(*(network.address(1) for network in networks))
"""


def test_networks_of_two_processes_have_different_addresses(tmp_path: Path) -> None:
    own = [Hosts(1, tmp_path) for _ in range(3)]
    argv = [sys.executable, "-c", ANOTHER_PROCESS, str(os.getpid())]
    others = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    addresses = [hosts.address(1) for hosts in own] + others
    for hosts in own:
        hosts.give_back()
    assert len(set(addresses)) == len(addresses)


@needs_hosts
def test_a_host_is_cut_off_and_comes_back(
    tmp_path: Path, two: Hosts, whole: dict[str, np.ndarray]
) -> None:
    """Over SSH from the first host: the job goes on without the second, and grows again."""
    hosts = ["--hosts", f"{two.address(1)}:1,{two.address(2)}:1", "--ssh", two.ssh()]
    with processes(tmp_path / "launcher") as group:
        flags = argv(tmp_path, "", "--nnodes", "1:2", *hosts)
        group.start(flags, SLOW_STEPS, before=two.inside(1))
        wait_for(lambda: has_checkpoint(tmp_path))
        two.cut_off(2)
        says(group, f"worker 1 is on {two.address(2)}, which does not answer any more (no message")
        says(group, f"going on with 1 worker: 1 on {two.address(1)}")
        two.bring_back(2)
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"[launch] it ran on {two.address(2)}" in done.stderr
    grown = f"going on with 2 workers: 1 on {two.address(1)}, 1 on {two.address(2)}"
    assert grown.replace("going on with", "the job restarts with") in done.stderr
    assert grown in done.stderr
    assert_the_same_within_rounding(tmp_path, whole)


@needs_hosts
def test_a_chief_that_was_cut_off_leaves_the_checkpoints_alone(
    tmp_path: Path, two: Hosts, whole: dict[str, np.ndarray]
) -> None:
    """It is slow to stop, on storage that it still reaches, while the job moves to another host.

    Before folders had an owner, its last checkpoint removed those of the job that had moved on.
    """
    file, checkpoints = tmp_path / "hosts", tmp_path / "checkpoints"
    file.write_text(f"{two.address(2)} slots=1\n")
    with processes(tmp_path / "launcher") as group:
        flags = ["--hostfile", str(file), "--nnodes", "1:2", "--ssh", two.ssh()]
        flags += ["--shutdown-grace-s", "60"]
        group.start(argv(tmp_path, "0.4.0.lag", *flags), SLOW_STEPS, before=two.inside(1))
        wait_for((tmp_path / "done-0-0").exists)
        stale = owner_of(checkpoints)
        two.cut_off(2)
        file.write_text(f"{two.address(1)} slots=1\n")
        says(group, f"going on with 1 worker: 1 on {two.address(1)}")
        wait_for(lambda: owner_of(checkpoints)["attempt"] == 1)
        assert owner_of(checkpoints)["run_id"] == stale["run_id"]
        wait_for(lambda: not Path(f"/proc/{stale['pid']}").exists(), 5)
        left = newest_step(checkpoints)
        wait_for(lambda: newest_step(checkpoints) > left)
        assert owner_of(checkpoints)["attempt"] == 1
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert_the_same_within_rounding(tmp_path, whole)


def owner_of(checkpoints: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoints / "owner.json").read_text())
    return found


def newest_step(checkpoints: Path) -> int:
    return max(int(path.stem.partition("-")[2]) for path in checkpoints.glob("step-*"))


@needs_hosts
def test_started_by_hand_on_each_host(
    tmp_path: Path, two: Hosts, whole: dict[str, np.ndarray]
) -> None:
    """A worker of the second is killed; later the command there gets a notice, SIGTERM."""
    env = {**SLOW_STEPS, "TFMULTI_SECRET": "known on both machines"}
    hosts = ["--hosts", f"{two.address(1)}:1,{two.address(2)}:1", "--nnodes", "1:2"]
    with processes(tmp_path / "launcher") as group:
        _, second = (
            group.start(
                argv(tmp_path, "0.3.1.kill", "--node-rank", str(place), *hosts),
                env,
                before=two.inside(place + 1),
            )
            for place in (0, 1)
        )
        says(group, "worker 1 was killed by SIGKILL")
        assert listening(two, 1, 29500) == [two.address(1)]  # on no other interface
        wait_for(lambda: (tmp_path / "checkpoints" / "step-000000008.npz").exists())
        second.send_signal(signal.SIGTERM)
        says(group, f"going on with 1 worker: 1 on {two.address(1)}")
        done = group.wait(LIMIT_S)
    assert [one.returncode for one in done] == [0, 143], done[0].stderr + done[1].stderr
    assert "worker 1 was asked to stop by SIGTERM" in done[0].stderr
    assert f"[launch] this machine is {two.address(2)} of the job" in done[1].stderr
    assert_the_same_within_rounding(tmp_path, whole)


@needs_hosts
def test_nothing_outlives_agent_and_guard_killed_at_once_on_a_host(
    tmp_path: Path, two: Hosts
) -> None:
    """The launcher on the first host lives on, so SSH does not end the second host's worker."""
    inner = ["sleep", str(secrets.randbelow(10**9) + 10**9)]
    flags = ["--hosts", f"{two.address(2)}:1", "--ssh", two.ssh(), "--max-restarts", "0"]
    flags += ["--log-dir", str(tmp_path / "logs"), "--no-python"]
    with processes(tmp_path / "launcher") as group:
        group.start(["-m", "tfmulti.launch", *flags, *inner], before=two.inside(1))
        wait_for(lambda: with_command(inner))
        # The shim execs the program, so the agent is its parent.
        [worker] = with_command(inner)
        agent = worker.parent()
        assert agent is not None
        assert "tfmulti" in " ".join(agent.cmdline())
        guards = [child for child in agent.children() if child.pid != worker.pid]
        assert guards
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in (*guards, agent):
                process.send_signal(number)
        try:
            wait_for(lambda: not with_command(inner), 15)
        finally:
            for process in with_command(inner):
                process.kill()
        [done] = group.wait(LIMIT_S)
    assert done.returncode != 0


def with_command(words: list[str]) -> list[psutil.Process]:
    """Returns the living processes with a command line."""
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == words]


@needs_hosts
@pytest.mark.parametrize(
    ("host", "program", "words"),
    [
        ("10.255.255.1:1", "tests.support.chaos", "too few machines for 2 s"),
        ("{here}:1", "tests.support.chaos", "does not let SSH in: "),
    ],
)
def test_hosts_that_cannot_be_used(
    tmp_path: Path, two: Hosts, host: str, program: str, words: str
) -> None:
    (Path(two.ssh().split()[-1]).parent / "key").write_text("") if "{here}" in host else None
    hosts = ["--hosts", f"{two.address(1)}:1,{host.format(here=two.address(2))}"]
    flags = ["--log-dir", str(tmp_path / "logs"), "--start-timeout", "2", "--ssh", two.ssh()]
    with processes(tmp_path / "launcher") as group:
        job = ["-m", "tfmulti.launch", *hosts, *flags, "-m", program]
        group.start(job, before=two.inside(1))
        [done] = group.wait(LIMIT_S)
    assert done.returncode == (1 if "too few" in words else 2)
    assert words in done.lines()[-1]
    assert not (tmp_path / "logs").exists()


def test_workers_leave_and_come_back(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """From three workers to two and back, as a host file says."""
    file = tmp_path / "hosts"
    file.write_text("localhost slots=3\n")
    with processes(tmp_path / "launcher") as group:
        flags = ["--hostfile", str(file), "--min-workers", "2"]
        group.start(argv(tmp_path, "", *flags), SLOW_STEPS)
        wait_for(lambda: has_checkpoint(tmp_path))
        file.write_text("localhost slots=2  # one goes\n")
        says(group, "going on with 2 workers: 2 on localhost")
        file.write_text("localhost slots=3\n")
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "going on with 3 workers: 3 on localhost" in done.stderr
    assert_the_same_within_rounding(tmp_path, whole)


def test_workers_that_fail_again_and_again_or_get_a_notice_are_left_out(
    tmp_path: Path, whole: dict[str, np.ndarray]
) -> None:
    """From three to two, since one of them is killed twice; and to one, of which SIGTERM is."""
    with processes(tmp_path / "launcher") as group:
        flags = ["--nproc-per-node", "3", "--min-workers", "1"]
        group.start(argv(tmp_path, "0.0.2.kill 0.0.2.kill 1.0.1.term", *flags))
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "[launch]" in line]
    assert [line for line in said if "going on with" in line] == [
        "[launch] going on with 2 workers: 2 on 127.0.0.1",
        "[launch] going on with 1 worker: 1 on 127.0.0.1",
    ]
    notice = "[launch] worker 1 was asked to stop by SIGTERM at step"
    assert any(line.startswith(notice) for line in said)
    assert done.stderr.count("starting all workers again") == 3
    assert_the_same_within_rounding(tmp_path, whole)
