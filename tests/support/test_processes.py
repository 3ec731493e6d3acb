"""Tests of the processes that tests start."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import Processes, processes

# Prints the number of a process that it leaves in its group.
LEAVES_ONE = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3).pid)"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process of somebody else, in a group of its own."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_the_number_of_an_ended_process_may_be_that_of_another_one(
    other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    class Reused(Processes):
        def _start(self, *args: object) -> subprocess.Popen[bytes]:
            process = super()._start(*args)  # type: ignore[arg-type]
            process.wait()
            process.pid = other.pid
            return process

    with processes(tmp_path, Reused) as group:
        group.start(["-c", ""])
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)


def test_what_an_ended_process_leaves_in_its_group_is_ended(tmp_path: Path) -> None:
    with processes(tmp_path) as group:
        group.start(["-c", LEAVES_ONE])
        [done] = group.wait(30)
        left = psutil.Process(int(done.stdout))
        assert left.name() == "sleep"
    deadline = time.monotonic() + 10
    while psutil.pid_exists(left.pid) and left.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_that_run_are_ended(tmp_path: Path) -> None:
    with processes(tmp_path) as group:
        process = group.start(["-c", "import time; time.sleep(1000)"])
    assert process.returncode == -9
