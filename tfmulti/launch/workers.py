"""The worker processes of one machine: their environment, output, status and standby."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.proxies import go_past_proxies
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import Guard, send_signal
from tfmulti.launch.heartbeat import (
    ERROR_FILE,
    PROGRESS_FILE,
    SAVED,
    HeartbeatRecord,
    WorkerFailure,
    read_error,
    read_progress,
)
from tfmulti.launch.idle import Idle
from tfmulti.launch.shim import COMMAND, PARENT, STANDBY
from tfmulti.launch.signals import GRACE
from tfmulti.launch.stacks import STACKS_FILE

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
SHIM = (sys.executable, "-m", "tfmulti.launch.shim")

_READ_BYTES = 1 << 16

# Words with digits, and in the group the parts of a whole.
_NUMBERS = re.compile(rb"(\d[\d.,]*(?: ?/ ?|[ -]of[ -])\d[\d.,]*|\d[\d.,]* ?%)|\w*\d\w*")
# The bytes that are compared of each line, and the most lines that are known at a time.
_LONGEST_TEXT, _MOST_TEXTS = 300, 1000

# Takes the rank of a worker, the name of a stream, and a line that the worker has written to it.
Sink = Callable[[int, str, bytes], None]


@dataclass(frozen=True)
class StartRequest:
    """A worker to start: its place in the job, and what it must know of the job.

    Attributes:
        rank: its rank.
        local_rank: its rank among the workers of its machine.
        local_world: the number of workers on its machine.
        addresses: the addresses of all workers, by rank.
        run_id: names the job, the same on all machines.
        attempt: the number of the attempt.
        folder: the folder on its machine for its logs, heartbeat, error and stacks.
        gpus: the number of GPUs of each worker; 0 without GPUs.
        saved: for each folder of checkpoints, the step of the newest one.
    """

    rank: int
    local_rank: int
    local_world: int
    addresses: tuple[str, ...]
    run_id: str
    attempt: int
    folder: str
    gpus: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker at one moment.

    Times are in seconds of `time.monotonic` on the worker's machine. `shifted` turns them into
    seconds of the launcher's clock.

    Attributes:
        rank: its rank.
        pid: the number of its process and of its process group.
        returncode: the return code of the process; None while it runs.
        ended_s: when it ended; None while it runs.
        heartbeat: its last heartbeat; None if it has not sent one.
        error: the error that it has written down; None without an error.
        frozen: whether it is stopped, as by SIGSTOP or a debugger.
        idle_since_s: since when its process group uses no core.
        still_since_s: since when its process group moves no byte from or to a disk, takes no more
            memory, and writes no new text (`NewText`).
    """

    rank: int
    pid: int
    returncode: int | None = None
    ended_s: float | None = None
    heartbeat: HeartbeatRecord | None = None
    error: WorkerFailure | None = None
    frozen: bool = False
    idle_since_s: float = float("inf")
    still_since_s: float = float("inf")

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self.returncode is None

    def shifted(self, by_s: float) -> WorkerStatus:
        """Returns the same status in the time of a clock that shows `by_s` seconds more."""
        heartbeat = self.heartbeat and dataclasses.replace(
            self.heartbeat, since_s=self.heartbeat.since_s + by_s
        )
        ended_s = None if self.ended_s is None else self.ended_s + by_s
        error = self.error and dataclasses.replace(self.error, time_s=self.error.time_s + by_s)
        return dataclasses.replace(
            self,
            heartbeat=heartbeat,
            ended_s=ended_s,
            error=error,
            idle_since_s=self.idle_since_s + by_s,
            still_since_s=self.still_since_s + by_s,
        )


def arguments(config: LaunchConfig) -> list[str]:
    """Returns the arguments of the shim that name the program."""
    return [*(["-m"] if config.module else []), *config.program]


def command(config: LaunchConfig) -> list[str]:
    """Returns the command line of a worker."""
    return [*SHIM, *(arguments(config) if config.python else [COMMAND, *config.program])]


def worker_env(
    config: LaunchConfig,
    env: Mapping[str, str],
    request: StartRequest,
    gpus: Sequence[str],
    cores: int,
) -> dict[str, str]:
    """Returns the environment of a worker: `env`, its place in the cluster, and its devices.

    Without GPUs each worker gets its part of the cores as its number of threads. Numbers of threads
    that `env` already has stay.

    Args:
        config: the job.
        env: the environment that the worker inherits.
        request: the worker.
        gpus: the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.
        cores: the number of cores of this machine.
    """
    cluster = Cluster(request.addresses, Task("worker", request.rank))
    folder = Path(request.folder)
    child = {
        **env,
        "TF_CONFIG": cluster.to_tf_config(),
        "RANK": str(request.rank),
        "LOCAL_RANK": str(request.local_rank),
        "WORLD_SIZE": str(len(request.addresses)),
        "LOCAL_WORLD_SIZE": str(request.local_world),
        "TFMULTI_RUN_ID": request.run_id,
        "TFMULTI_ATTEMPT": str(request.attempt),
        GRACE: f"{config.shutdown_grace_s:g}",
        SAVED: json.dumps(dict(request.saved)),
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
        PROGRESS_FILE: str(folder / "progress"),
        ERROR_FILE: str(folder / "error.json"),
        STACKS_FILE: str(folder / "stacks.txt"),
    }
    if gpus:
        first = request.local_rank * request.gpus
        child["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + request.gpus])
    else:
        for name in THREADS:
            child.setdefault(name, str(max(1, cores // request.local_world)))
    # A program of the user's own may start TensorFlow's server without `make_strategy`.
    go_past_proxies(cluster.hosts, child)
    return child


class NewText:
    """Knows which lines a stream has had before, apart from their numbers.

    A program that polls may print one line for ever, with the time and the number of the attempt.
    So words with digits do not count. A part of a whole (17/100, 17 of 100, 17 %) counts, because
    it has an end.

    >>> new_text = NewText()
    >>> [new_text.is_new(line) for line in (b"12:01 attempt 1", b"12:02 attempt 2", b"1/9", b"2/9")]
    [True, False, True, True]
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def is_new(self, line: bytes) -> bool:
        """Returns whether no such line came before. An empty line is never new."""
        text = _NUMBERS.sub(rb"\1", line[:_LONGEST_TEXT]).strip()
        if not text or text in self._known:
            return False
        if len(self._known) == _MOST_TEXTS:
            self._known.clear()
        self._known.add(text)
        return True


@dataclass
class Worker:
    """One worker process, its folder, and the threads that read its output.

    Attributes:
        rank: the rank of the worker.
        process: the process.
        folder: the folder of its files.
        readers: the threads that read its output.
        ended_s: when it ended; None while it runs.
        closed_s: when its streams of output were closed, with infinity as the first item.
        new_text_s: when it last wrote new text, or -inf.
    """

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    readers: list[threading.Thread] = field(default_factory=list)
    ended_s: float | None = None
    closed_s: list[float] = field(default_factory=lambda: [float("inf")])
    new_text_s: float = float("-inf")

    def status(self, idle: Idle) -> WorkerStatus:
        """Returns the status of the worker at this moment.

        Args:
            idle: knows since when process groups are idle.
        """
        returncode = self.process.poll()
        if returncode is not None and self.ended_s is None:
            # The output ends with the process, which may be well before this call.
            self.ended_s = min(time.monotonic(), *self.closed_s)
        return WorkerStatus(
            self.rank,
            self.process.pid,
            returncode,
            self.ended_s,
            read_progress(self.folder / "progress"),
            read_error(self.folder / "error.json"),
            returncode is None and self._is_stopped(),
            idle.since(self.process.pid),
            max(idle.still_since(self.process.pid), self.new_text_s),
        )

    def _is_stopped(self) -> bool:
        """Returns whether the process is stopped by a signal or a debugger, from proc(5)."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def stacks(self) -> str:
        """Returns the stacks that faulthandler has written at SIGUSR1."""
        with contextlib.suppress(OSError):
            return (self.folder / "stacks.txt").read_text().rstrip()
        return "(none: not a Python program)"

    def read(self, sink: Sink) -> None:
        """Starts two threads that give each line of the worker's output to `sink`."""
        for name, source in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            assert source is not None
            reader = threading.Thread(target=self._read, args=(name, source, sink), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, name: str, source: IO[bytes], sink: Sink) -> None:
        """Gives each line of a stream to `sink` until the stream ends."""
        partial_line, new_text = bytearray(), NewText()
        with source:
            while data := os.read(source.fileno(), _READ_BYTES):
                *line_ends, rest = data.split(b"\n")
                for line_end in line_ends:
                    sink(self.rank, name, bytes(partial_line) + line_end + b"\n")
                    partial_line.clear()
                partial_line += rest
                # A part of a line counts, too, because progress bars return to its start.
                if any([new_text.is_new(text) for text in (*line_ends, rest)]):
                    self.new_text_s = time.monotonic()
            if partial_line:
                sink(self.rank, name, bytes(partial_line))
        self.closed_s.append(time.monotonic())


class Standby:
    """Standby processes that have imported TensorFlow, one for each worker of the next attempt.

    They are started only when the workers have trained a step with tfmulti, so that the next
    workers need TensorFlow.

    Args:
        config: the job.
        guard: ends the processes when the launcher is gone.
    """

    def __init__(self, config: LaunchConfig, guard: Guard) -> None:
        self._config, self._guard = config, guard
        self._spare: dict[int, subprocess.Popen[bytes]] = {}

    def fill(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Starts the standby processes that are missing.

        Args:
            envs: the environments of the workers on this machine, by local rank.
        """
        for local_rank, env in enumerate(envs):
            if local_rank not in self._spare and self._config.standby:
                standby_process = start([*SHIM, STANDBY], env, stdin=subprocess.PIPE)
                self._guard.add(standby_process.pid)
                self._spare[local_rank] = standby_process

    def take(self, local_rank: int, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Turns a standby process into a worker.

        Args:
            local_rank: the local rank of the worker.
            env: the environment of the worker.

        Returns:
            The process, or None if there is no standby process that runs.
        """
        standby_process = self._spare.pop(local_rank, None)
        if standby_process is None:
            return None
        assert standby_process.stdin is not None
        request = {"env": dict(env), "arguments": arguments(self._config)}
        try:
            standby_process.stdin.write(json.dumps(request).encode() + b"\n")
            standby_process.stdin.close()
        except BrokenPipeError:
            # The process has died. The system may give its number to another process group.
            send_signal(standby_process.pid, signal.SIGKILL)
            standby_process.wait()
            self._guard.remove(standby_process.pid)
            return None
        return standby_process

    def end(self) -> None:
        """Kills the standby processes that were not used."""
        for standby_process in self._spare.values():
            send_signal(standby_process.pid, signal.SIGKILL)
            standby_process.wait()
            self._guard.remove(standby_process.pid)
        self._spare.clear()


def start(argv: Sequence[str], env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    """Starts a process in a session and a process group of its own, with its output in pipes.

    Args:
        argv: the command line.
        env: the whole environment.
        stdin: the standard input, as `subprocess.Popen` takes it.
    """
    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
