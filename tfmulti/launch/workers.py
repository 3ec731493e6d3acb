"""The processes of one attempt on one machine: started, read, looked at, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import Guard, send
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
from tfmulti.launch.shim import COMMAND, PARENT, STACKS_FILE, STANDBY

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
SHIM = (sys.executable, "-m", "tfmulti.launch.shim")

Sink = Callable[[int, str, bytes], None]  # takes rank, stream and line of what a worker writes


@dataclass(frozen=True)
class StartRequest:
    """A worker to start: its place in the job, and what it is told of it."""

    rank: int
    local_rank: int
    local_world: int
    addresses: tuple[str, ...]
    run_id: str
    attempt: int
    folder: str  # on its machine, for its logs, progress, error and stacks
    gpus: int = 0
    saved: Mapping[str, int] = field(
        default_factory=dict
    )  # folder -> step of its newest checkpoint


@dataclass(frozen=True)
class WorkerStatus:
    """A worker at one look. Times are in seconds of the launcher's `time.monotonic`."""

    rank: int
    pid: int
    returncode: int | None = None
    ended_s: float | None = None
    told: HeartbeatRecord | None = None
    error: WorkerFailure | None = None
    frozen: bool = False
    idle_since_s: float = float("inf")  # since when it and its children use no core

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.returncode is None

    def shifted(self, by_s: float) -> WorkerStatus:
        """Returns the same in the time of another clock, which shows `by_s` more."""
        told = self.told and dataclasses.replace(self.told, since_s=self.told.since_s + by_s)
        ended_s = None if self.ended_s is None else self.ended_s + by_s
        error = self.error and dataclasses.replace(self.error, time_s=self.error.time_s + by_s)
        return dataclasses.replace(
            self,
            told=told,
            ended_s=ended_s,
            error=error,
            idle_since_s=self.idle_since_s + by_s,
        )


def arguments(config: LaunchConfig) -> list[str]:
    """Returns what the shim is given to run."""
    return [*(["-m"] if config.module else []), *config.program]


def command(config: LaunchConfig) -> list[str]:
    """Returns the command line of a worker."""
    return [*SHIM, *(arguments(config) if config.python else [COMMAND, *config.program])]


def worker_env(
    config: LaunchConfig,
    env: Mapping[str, str],
    order: StartRequest,
    gpus: Sequence[str],
    cores: int,
) -> dict[str, str]:
    """Returns the environment of a worker: `env`, its place in the cluster, and its devices.

    Without GPUs each worker gets its part of the cores; what the user has set stays.
    """
    cluster = Cluster(order.addresses, Task("worker", order.rank))
    folder = Path(order.folder)
    child = {
        **env,
        "TF_CONFIG": cluster.to_tf_config(),
        "RANK": str(order.rank),
        "LOCAL_RANK": str(order.local_rank),
        "WORLD_SIZE": str(len(order.addresses)),
        "LOCAL_WORLD_SIZE": str(order.local_world),
        "TFMULTI_RUN_ID": order.run_id,
        "TFMULTI_ATTEMPT": str(order.attempt),
        "TFMULTI_GRACE_S": f"{config.shutdown_grace_s:g}",
        SAVED: json.dumps(dict(order.saved)),
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
        PROGRESS_FILE: str(folder / "progress"),
        ERROR_FILE: str(folder / "error.json"),
        STACKS_FILE: str(folder / "stacks.txt"),
    }
    if gpus:
        first = order.local_rank * order.gpus
        child["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + order.gpus])
    else:
        for name in THREADS:
            child.setdefault(name, str(max(1, cores // order.local_world)))
    return child


@dataclass
class Worker:
    """One process, its folder, and the threads that read its output."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    readers: list[threading.Thread] = field(default_factory=list)
    ended_s: float | None = None
    silent_s: list[float] = field(default_factory=lambda: [float("inf")])  # its output's end

    def look(self, idle: Idle) -> WorkerStatus:
        """Returns what can be seen of it now."""
        returncode = self.process.poll()
        if returncode is not None and self.ended_s is None:
            # The end of its output is nearer to its own than the next look at it.
            self.ended_s = min(time.monotonic(), *self.silent_s)
        return WorkerStatus(
            self.rank,
            self.process.pid,
            returncode,
            self.ended_s,
            read_progress(self.folder / "progress"),
            read_error(self.folder / "error.json"),
            returncode is None and self._is_stopped(),
            idle.since(self.process.pid),
        )

    def _is_stopped(self) -> bool:
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def stacks(self) -> str:
        """Returns what faulthandler has written of it, after SIGUSR1."""
        with contextlib.suppress(OSError):
            return (self.folder / "stacks.txt").read_text().rstrip()
        return "(none: not a Python program)"

    def read(self, sink: Sink) -> None:
        """Gives each line that it writes to `sink`, in threads of their own."""
        for name, source in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            assert source is not None
            reader = threading.Thread(target=self._read, args=(name, source, sink), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, name: str, source: IO[bytes], sink: Sink) -> None:
        with source:
            for line in iter(source.readline, b""):
                sink(self.rank, name, line)
        self.silent_s.append(time.monotonic())


class Standby:
    """Processes that have imported TensorFlow already, one for each worker of the next attempt.

    They are made when the workers train with tfmulti, so that TensorFlow is what they need.
    """

    def __init__(self, config: LaunchConfig, guard: Guard) -> None:
        self._config, self._guard = config, guard
        self._spare: dict[int, subprocess.Popen[bytes]] = {}

    def fill(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Starts what is missing, with the environments that the workers have now."""
        for place, env in enumerate(envs):
            if place not in self._spare and self._config.standby:
                spare = start([*SHIM, STANDBY], env, stdin=subprocess.PIPE)
                self._guard.add(spare.pid)
                self._spare[place] = spare

    def take(self, place: int, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Returns a process that becomes the worker, or None where none is there."""
        spare = self._spare.pop(place, None)
        if spare is None or spare.poll() is not None:
            return None
        assert spare.stdin is not None
        order = {"env": dict(env), "arguments": arguments(self._config)}
        try:
            spare.stdin.write(json.dumps(order).encode() + b"\n")
            spare.stdin.close()
        except BrokenPipeError:
            return None
        return spare

    def end(self) -> None:
        """Ends those that were not needed."""
        for spare in self._spare.values():
            send(spare.pid, signal.SIGKILL)
            spare.wait()
            self._guard.remove(spare.pid)
        self._spare.clear()


def start(argv: Sequence[str], env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own whose output can be read."""
    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
