"""A machine of the job as the launcher sees it: its workers, its ports, its devices.

`Machine` says what every machine can do. `LocalMachine` is the one on which this process runs, and
`remote_machine.RemoteMachine` one behind a connection.
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
from tfmulti.launch.guard import Guard, send
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

STACKS_WAIT_S = 0.5  # for faulthandler to write


class Unreachable(Exception):
    """A machine does not answer, or not any more. The message says why."""


class Machine(Protocol):
    """What a machine can do. Each of these may raise `Unreachable`."""

    name: str
    cores: int
    gpus: int

    def reserve(self, count: int) -> list[str]:
        """Returns addresses for so many workers, kept from others until they are killed."""

    def start(self, orders: Sequence[StartRequest]) -> None:
        """Starts workers, each in a process group of its own."""

    def look(self) -> list[WorkerStatus]:
        """Returns what can be seen of the workers."""

    def silent(self, addresses: Sequence[str]) -> list[int]:
        """Returns the places of the addresses that do not answer from here."""

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of the workers that run, by rank."""

    def prepare(self, orders: Sequence[StartRequest]) -> None:
        """Makes processes ready that can become these workers in another attempt."""

    def stop(self) -> None:
        """Asks the workers to stop: SIGTERM, which one that is frozen hears, too."""

    def kill(self) -> None:
        """Ends all workers at once and waits for them; their ports are free again."""

    def close(self, code: int = 0) -> None:
        """Ends everything that was started there; `code` is the exit code of the job."""


class LocalMachine:
    """The machine on which this process runs. Make it before any thread is started."""

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
        return self._ports.enter_context(reserved(count, self.name))

    def start(self, orders: Sequence[StartRequest]) -> None:
        for order in orders:
            order = self._with_folder(order)
            folder = Path(order.folder)
            child = self._child_env(order)
            process = self._standby.take(order.local_rank, child)
            if process is None:
                process = start(command(self._config), child, stdin=subprocess.DEVNULL)
                self._guard.add(process.pid)
            worker = Worker(order.rank, process, folder)
            self._workers.append(worker)
            worker.read(self._sink)

    def _with_folder(self, order: StartRequest) -> StartRequest:
        try:
            Path(order.folder).mkdir(parents=True, exist_ok=True)
        except OSError:  # a full disk
            return dataclasses.replace(order, folder=tempfile.mkdtemp(prefix="tfmulti-worker-"))
        return order

    def look(self) -> list[WorkerStatus]:
        self._guard.check()
        seen = []
        for worker in self._workers:
            ended_before = worker.ended_s is not None
            seen.append(worker.look(self._idle))
            if not (seen[-1].runs or ended_before):
                self._guard.remove(worker.process.pid)
        return seen

    def silent(self, addresses: Sequence[str]) -> list[int]:
        return silent(addresses)

    def stacks(self) -> dict[int, str]:
        running = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in running:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_WAIT_S)
        return {worker.rank: worker.stacks() for worker in running}

    def prepare(self, orders: Sequence[StartRequest]) -> None:
        self._standby.fill([self._child_env(order) for order in orders])

    def stop(self) -> None:
        for worker in self._workers:
            for number in (signal.SIGTERM, signal.SIGCONT):
                if self._config.python:  # what it has started, it ends itself
                    worker.process.send_signal(number)
                else:
                    send(worker.process.pid, number)

    def kill(self) -> None:
        for worker in self._workers:
            send(worker.process.pid, signal.SIGKILL)  # the group: also what it left behind
        for worker in self._workers:
            worker.process.wait()
        self.look()
        for worker in self._workers:
            for reader in worker.readers:
                reader.join(2.0)  # a child of the worker's own may hold its output open
        self._workers.clear()
        self._ports.close()

    def close(self, code: int = 0) -> None:
        self.kill()
        self._standby.end()
        self._guard.close()

    def _child_env(self, order: StartRequest) -> dict[str, str]:
        return worker_env(self._config, self._env, order, self._gpus, self.cores)
