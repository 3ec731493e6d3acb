"""Starts processes for tests, with time limits and logs on failure, and ends all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tfmulti.cluster.environments import ENVIRONMENTS
from tfmulti.launch.addresses import reserved

ROOT = Path(__file__).resolve().parents[2]

# For processes that run at the same time. Most of their time is tracing on one thread, so more
# threads would only compete for the cores.
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}


def at_a_time() -> int:
    """Returns how many processes a test starts at the same time, so that two run in all."""
    return 1 if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1" else 2


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(process: int) -> list[int]:
    """Returns the child processes of a process, or none if it has ended."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def listening_in(table: str) -> list[tuple[str, int, str]]:
    """Returns the address, the port and the inode of the sockets that listen, see proc_pid_net(5).

    Args:
        table: the text of /proc/net/tcp or /proc/net/tcp6.
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    sockets = [(*row[1].split(":"), row[9]) for row in rows if row[3] == "0A"]
    return [
        (socket.inet_ntoa(bytes.fromhex(address[-8:])[::-1]), int(port, 16), inode)
        for address, port, inode in sockets
    ]


def program_of(process: int) -> str:
    """Returns the name of the program that a process runs, or nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return ""


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this environment without the variables that describe a cluster, and with `extra`."""
    left_out = {"CUDA_VISIBLE_DEVICES"}.union(*(of.VARIABLES for of in ENVIRONMENTS.values()))
    # HOSTNAME belongs to Kubernetes, but shells set it, too.
    env = {k: v for k, v in os.environ.items() if k not in left_out - {"HOSTNAME"}}
    env.update({"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"})
    env.update(extra or {})
    return env


def tf_config(addresses: Sequence[str], index: int) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


@dataclass
class Finished:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def lines(self) -> list[str]:
        return self.stderr.strip().splitlines()


class Processes:
    """A group of processes that are always ended together, by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[subprocess.Popen[bytes], float]] = []

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        before: Sequence[str] = (),
        python: str = sys.executable,
    ) -> subprocess.Popen[bytes]:
        """Starts Python with arguments. `before` is a command prefix, such as `ip netns exec`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(self._started)
        with (
            open(self._log(number, "stdout"), "wb") as out,
            open(self._log(number, "stderr"), "wb") as err,
        ):
            process = self._start([*before, python, *argv], clean_env(env), cwd, out, err)
        self._started.append((process, time.monotonic()))
        return process

    def _start(
        self, argv: list[str], env: dict[str, str], cwd: Path, out: IO[bytes], err: IO[bytes]
    ) -> Any:
        """Starts a process, and returns a `Popen`, or an object that is used like one."""
        return subprocess.Popen(
            argv,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @classmethod
    def run_workers(
        cls,
        argv: Sequence[str],
        count: int,
        folder: Path,
        *,
        limit_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> list[Finished]:
        """Runs the same command as `count` workers with TF_CONFIG on loopback.

        Raises:
            AssertionError: a worker failed or hung. The message has the logs of all workers.
        """
        with processes(folder, cls) as group, reserved(count) as addresses:
            for index in range(count):
                group.start(argv, {**(env or {}), "TF_CONFIG": tf_config(addresses, index)}, cwd)
            finished = group.wait(limit_s)
            failed = [n for n, done in enumerate(finished) if done.returncode]
            assert not failed, f"workers {failed} failed\n{group.logs()}"
        return finished

    @classmethod
    def run(
        cls,
        argv: Sequence[str],
        folder: Path,
        *,
        limit_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Finished:
        """Runs one command to its end, within a time limit."""
        with processes(folder, cls) as group:
            group.start(argv, env, cwd)
            return group.wait(limit_s)[0]

    def pid(self, number: int) -> int:
        """Returns the id of a process."""
        return self._started[number][0].pid

    def wait(self, limit_s: float) -> list[Finished]:
        """Waits for all processes. If one exceeds the limit, the test fails with all logs."""
        deadline = time.monotonic() + limit_s
        finished = []
        for number, (process, started) in enumerate(self._started):
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"process {number} was still running after {limit_s} s\n{self.logs()}"
                ) from None
            finished.append(
                Finished(
                    process.returncode,
                    self._read(number, "stdout"),
                    self._read(number, "stderr"),
                    time.monotonic() - started,
                )
            )
        return finished

    def logs(self) -> str:
        """Returns the ends of all logs, each with its process as the heading."""
        parts = []
        for number, (process, _) in enumerate(self._started):
            for kind in ("stdout", "stderr"):
                text = self._read(number, kind)[-6000:]
                parts.append(f"--- process {number} ({process.poll()}) {kind} ---\n{text}")
        return "\n".join(parts)

    def output(self, number: int) -> str:
        return self._read(number, "stdout")

    def errors(self, number: int) -> str:
        return self._read(number, "stderr")

    def end(self) -> None:
        """Kills the processes of this group that still run.

        A process that has ended may have left other processes in its process group. They are killed
        as well.
        """
        for process, _ in self._started:
            # The system gives the number of a process that has ended to another one, unless a
            # process is left in its group.
            if process.poll() is None or not Path(f"/proc/{process.pid}").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process, _ in self._started:
            process.wait()

    def _log(self, number: int, kind: str) -> Path:
        return self._folder / f"process_{number}.{kind}.log"

    def _read(self, number: int, kind: str) -> str:
        return self._log(number, kind).read_text(errors="replace")


@contextlib.contextmanager
def processes(folder: Path, kind: type[Processes] | None = None) -> Iterator[Processes]:
    """Yields a group of processes, which is killed at the end of the context."""
    group = (kind or Processes)(folder)
    try:
        yield group
    finally:
        group.end()


run, run_workers = Processes.run, Processes.run_workers


@contextlib.contextmanager
def slowed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Lets a process run for a fifteenth of the time only, as on a slow or busy machine.

    Other tests may leave a process that is not slowed a fifth of a core, so a small slowdown would
    not be seen. The process first has as much processor time as loading TensorFlow takes. If it
    runs for more than two milliseconds at a time, since the machine is busy, it then waits longer.
    """
    end = threading.Event()

    def slow_down() -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            while not end.wait(0.1) and sum(psutil.Process(process.pid).cpu_times()[:2]) < 5:
                pass
            ran_s = 0.002
            while not end.is_set() and process.poll() is None:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(14 * ran_s)
                os.kill(process.pid, signal.SIGCONT)
                began_s = time.perf_counter()
                time.sleep(0.002)
                ran_s = time.perf_counter() - began_s

    thread = threading.Thread(target=slow_down, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
