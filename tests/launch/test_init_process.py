"""Tests that the shim is a good first process of a container (PID 1)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Processes, children_of, processes, program_of

LIMIT_S = 30
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The container of a pod with `shareProcessNamespace`: `sleep` has PID 1, and the shell is outside.
_SHARED = """
sleep infinity &
pause=$!
mount -t proc proc /proc
"$@"
code=$?
kill -KILL "$pause"
exit "$code"
"""
SHARED = ["unshare", "--pid", "--mount", "sh", "-c", _SHARED, "-"]
# Before the command of the image.
BLOCKED = ["env", "--block-signal=TERM"]


def why_not() -> str | None:
    """Returns why no process can be the first of a PID namespace here, or None."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "PID namespaces need root and unshare"
    done = subprocess.run([*CONTAINER, "true"], capture_output=True)
    return f"PID namespaces are not allowed here: {done.stderr!r}" if done.returncode else None


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ORPHAN = """
import os, time
if os.fork() == 0:
    # The parent of the process below ends before it, so PID 1 becomes its parent.
    if os.fork() == 0:
        time.sleep(0.2)
    os._exit(0)
os.wait()
deadline = time.monotonic() + 10
while sum(name.isdigit() for name in os.listdir("/proc")) > 2:
    assert time.monotonic() < deadline, os.listdir("/proc")
    time.sleep(0.05)
print(os.getppid())
"""
HANDLER = """
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(9))
os.kill(os.getppid(), signal.SIGUSR2)
time.sleep(20)
"""
SIGWAIT = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getppid(), signal.SIGTERM)
sys.exit(5 if signal.sigwait([signal.SIGTERM]) else 6)
"""


@contextlib.contextmanager
def started(program: str, folder: Path, container: list[str]) -> Iterator[Processes]:
    """Starts a program under the shim, as the command of a container."""
    (folder / "program.py").write_text(program)
    with processes(folder / "logs") as group:
        argv = ["-m", "tfmulti.launch.shim", str(folder / "program.py")]
        group.start(argv, before=container)
        yield group


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("print('done')", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
        ("import os; os.kill(os.getppid(), 15); os.read(os.pipe()[0], 1)", 128 + signal.SIGTERM),
        (HANDLER, 9),
        (SIGWAIT, 5),
    ],
    ids=["done", "exit", "killed", "sigterm", "handler", "sigwait"],
)
@pytest.mark.parametrize(
    "container",
    [CONTAINER, SHARED, [*CONTAINER, *BLOCKED], [*SHARED, *BLOCKED]],
    ids=["PID 1", "shared", "PID 1, blocked", "shared, blocked"],
)
def test_a_container_ends_with_the_code_of_its_program(
    container: list[str], program: str, code: int, tmp_path: Path
) -> None:
    with started(program, tmp_path, container) as group:
        done = group.wait(LIMIT_S)[0]
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("container", [SHARED, [*CONTAINER, *BLOCKED]], ids=["shared", "PID 1"])
def test_sigterm_ends_a_container_before_python_runs(container: list[str], tmp_path: Path) -> None:
    """As PID 1, the process would not get the signal, and the program would run to its end."""
    with started("print('ended by itself')", tmp_path, container) as group:
        deadline = time.monotonic() + LIMIT_S
        while not (
            found := [p for p in children_of(group.pid(0)) if program_of(p).startswith("python")]
        ):
            assert time.monotonic() < deadline, group.logs()
        os.kill(found[0], signal.SIGTERM)
        done = group.wait(LIMIT_S)[0]
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


def test_orphaned_processes_are_collected(tmp_path: Path) -> None:
    with started(ORPHAN, tmp_path, CONTAINER) as group:
        done = group.wait(LIMIT_S)[0]
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
