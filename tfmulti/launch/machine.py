"""A machine of the job as the launcher uses it: its workers, its ports and its devices.

`Machine` is the interface. `LocalMachine` is the machine on which this process runs, and
`remote_machine.RemoteMachine` is a machine behind a connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tfmulti.cluster.gpus import visible_gpus
from tfmulti.launch.addresses import reserved, silent
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import Guard, send_signal
from tfmulti.launch.idle import Idle
from tfmulti.launch.workers import (
    Sink,
    Standby,
    StartRequest,
    Worker,
    WorkerStatus,
    command,
    start,
    worker_env,
)

# The time that faulthandler gets to write the stacks.
STACKS_WAIT_S = 0.5


class Unreachable(Exception):
    """Raised when a machine does not answer, or has stopped answering. The message says why."""


class Machine(Protocol):
    """What the launcher can ask of a machine.

    Each method except `close` may raise `Unreachable`.

    Attributes:
        name: the host name.
        cores: the number of cores.
        gpus: the number of GPUs that the job may use.
    """

    name: str
    cores: int
    gpus: int

    def reserve(self, count: int) -> list[str]:
        """Returns addresses for `count` workers, reserved for this job until `kill`."""

    def start(self, requests: Sequence[StartRequest]) -> None:
        """Starts workers, each in a process group of its own."""

    def statuses(self) -> list[WorkerStatus]:
        """Returns the status of each worker that was started here."""

    def silent(self, addresses: Sequence[str]) -> list[int]:
        """Returns the indices of the addresses at which, seen from this machine, nobody listens."""

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of the running workers, by rank."""

    def prepare(self, requests: Sequence[StartRequest]) -> None:
        """Starts standby processes that can become these workers in another attempt."""

    def stop(self) -> None:
        """Asks the workers to stop by SIGTERM. A frozen worker is woken, so that it receives it."""

    def kill(self) -> None:
        """Kills all workers, waits for their end, and gives up the reserved addresses."""

    def close(self, code: int = 0) -> None:
        """Ends every process that was started there. `code` is the exit code of the job."""


class LocalMachine:
    """The machine on which this process runs. Make it before any thread is started.

    The guard is a forked process, and a process with threads must not fork.

    Args:
        config: the job.
        env: the environment that the workers inherit.
        name: the host name of this machine, or the loopback address.
        sink: takes each line that a worker writes.
    """

    def __init__(self, config: LaunchConfig, env: Mapping[str, str], name: str, sink: Sink) -> None:
        self.name = name
        self.cores = os.cpu_count() or 1
        self._gpus = visible_gpus(env)
        self.gpus = len(self._gpus)
        self._config, self._env, self._sink = config, env, sink
        self._guard = Guard(config.shutdown_grace_s)
        self._standby = Standby(config, self._guard)
        self._ports = contextlib.ExitStack()
        self._workers: list[Worker] = []
        self._idle = Idle()

    def reserve(self, count: int) -> list[str]:
        """Returns addresses for `count` workers, reserved for this job until `kill`."""
        return self._ports.enter_context(reserved(count, self.name))

    def start(self, requests: Sequence[StartRequest]) -> None:
        """Starts workers, from standby processes if there are any."""
        for request in requests:
            request = self._with_folder(request)
            folder = Path(request.folder)
            env = self._worker_env(request)
            process = self._standby.take(request.local_rank, env)
            if process is None:
                process = start(command(self._config), env, stdin=subprocess.DEVNULL)
                self._guard.add(process.pid)
            worker = Worker(request.rank, process, folder)
            self._workers.append(worker)
            worker.read(self._sink)

    def _with_folder(self, request: StartRequest) -> StartRequest:
        """Makes the worker's folder; returns the request, with another folder if that fails."""
        try:
            Path(request.folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            # The disk may be full.
            return dataclasses.replace(request, folder=tempfile.mkdtemp(prefix="tfmulti-worker-"))
        return request

    def statuses(self) -> list[WorkerStatus]:
        """Returns the status of each worker; starts another guard if the guard was killed."""
        self._guard.check()
        statuses = []
        for worker in self._workers:
            ended_before = worker.ended_s is not None
            statuses.append(worker.status(self._idle))
            if not (statuses[-1].runs or ended_before):
                self._guard.remove(worker.process.pid)
        return statuses

    def silent(self, addresses: Sequence[str]) -> list[int]:
        """Returns the indices of the addresses at which nobody listens."""
        return silent(addresses)

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of the running workers, by rank."""
        running = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in running:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_WAIT_S)
        return {worker.rank: worker.stacks() for worker in running}

    def prepare(self, requests: Sequence[StartRequest]) -> None:
        """Starts standby processes for these workers, where they are missing."""
        self._standby.fill([self._worker_env(request) for request in requests])

    def stop(self) -> None:
        """Asks the workers to stop by SIGTERM, and wakes frozen workers by SIGCONT."""
        for worker in self._workers:
            for number in (signal.SIGTERM, signal.SIGCONT):
                # A Python worker ends the processes that it has started. Another program may not,
                # so its whole process group gets the signals.
                if self._config.python:
                    worker.process.send_signal(number)
                else:
                    send_signal(worker.process.pid, number)

    def kill(self) -> None:
        """Kills all workers, waits for their end, and gives up the reserved addresses."""
        for worker in self._workers:
            # The whole group is killed, because a worker may have left processes behind.
            send_signal(worker.process.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()
        self.statuses()
        for worker in self._workers:
            for reader in worker.readers:
                # The wait has a limit, because a process that the worker has started in another
                # group may hold its output open.
                reader.join(2.0)
        self._workers.clear()
        self._ports.close()

    def close(self, code: int = 0) -> None:
        """Ends every process that was started here. The exit code is not used."""
        self.kill()
        self._standby.end()
        self._guard.close()

    def _worker_env(self, request: StartRequest) -> dict[str, str]:
        """Returns the environment of a worker on this machine."""
        return worker_env(self._config, self._env, request, self._gpus, self.cores)
