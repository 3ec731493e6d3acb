"""The processes of one attempt on this machine: started, read, looked at, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tfmulti.cluster import Cluster, Task
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import Guard, send
from tfmulti.launch.shim import STACKS_FILE, STANDBY
from tfmulti.launched import ERROR_FILE, PROGRESS_FILE, Told, read_progress

_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


SHIM = (sys.executable, "-m", "tfmulti.launch.shim")


def arguments(config: LaunchConfig) -> list[str]:
    """Returns what the shim is given to run."""
    return [*(["-m"] if config.module else []), *config.program]


def command(config: LaunchConfig) -> list[str]:
    """Returns the command line of a worker."""
    return [*SHIM, *arguments(config)] if config.python else list(config.program)


def worker_env(
    config: LaunchConfig,
    env: Mapping[str, str],
    addresses: Sequence[str],
    rank: int,
    run_id: str,
    attempt: int,
    cores: int,
) -> dict[str, str]:
    """Returns the environment of a worker: `env`, its place in the cluster, and its devices.

    Without GPUs each worker gets its part of the cores; what the user has set stays.
    """
    cluster = Cluster(tuple(addresses), Task("worker", rank))
    child = {
        **env,
        "TF_CONFIG": cluster.to_tf_config(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.workers),
        "LOCAL_WORLD_SIZE": str(config.workers),
        "TFMULTI_RUN_ID": run_id,
        "TFMULTI_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",
    }
    if config.gpus:
        each = len(config.gpus) // config.workers
        own = config.gpus[rank * each : (rank + 1) * each]
        child["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    else:
        for name in _THREADS:
            child.setdefault(name, str(max(1, cores // config.workers)))
    return child


@dataclass
class Worker:
    """One process, its folder of logs, and the threads that read its output."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    address: str
    readers: list[threading.Thread] = field(default_factory=list)
    exited_s: float | None = None
    silent_s: list[float] = field(default_factory=lambda: [float("inf")])  # its output's end

    @property
    def told(self) -> Told | None:
        return read_progress(self.folder / "progress")

    @property
    def error_file(self) -> Path:
        return self.folder / "error.json"

    @property
    def stacks_file(self) -> Path:
        return self.folder / "stacks.txt"

    def is_stopped(self) -> bool:
        """Whether the process is frozen, by SIGSTOP or a debugger."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def last_line(self) -> str:
        """Returns the last line that it wrote to its logs, standard error first."""
        for name in ("stderr.log", "stdout.log"):
            with contextlib.suppress(OSError), open(self.folder / name, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
                if lines:
                    return lines[-1]
        return ""


class Standby:
    """Processes that have imported TensorFlow already, one for each worker of the next attempt.

    They are made when the workers train with tfmulti, so that TensorFlow is what they need.
    """

    def __init__(self, config: LaunchConfig, guard: Guard) -> None:
        self._config, self._guard = config, guard
        self._spare: dict[int, subprocess.Popen[bytes]] = {}

    def fill(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Starts what is missing, with the environments that the workers have now."""
        for rank, env in enumerate(envs):
            if rank not in self._spare and self._config.standby:
                self._spare[rank] = _start([*SHIM, STANDBY], env, stdin=subprocess.PIPE)
                self._guard.add(self._spare[rank].pid)

    def take(self, rank: int, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Returns a process that becomes the worker, or None where none is there."""
        spare = self._spare.pop(rank, None)
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


def _start(argv: list[str], env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


class Workers:
    """All workers of one attempt. A context: whatever happens, none is left at its end."""

    def __init__(
        self, config: LaunchConfig, guard: Guard, standby: Standby, folder: Path, width: int
    ) -> None:
        self._config, self._guard, self._folder, self._width = config, guard, folder, width
        self._standby = standby
        self.all: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end(grace_s=0.0)
        for worker in self.all:
            for reader in worker.readers:
                reader.join(2.0)  # a child of the worker's own may hold its output open

    def start(self, env: Mapping[str, str], address: str) -> Worker:
        """Starts the next worker in a process group of its own."""
        rank = len(self.all)
        folder = self._folder / f"worker_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        child = {
            **env,
            PROGRESS_FILE: str((folder / "progress").absolute()),
            ERROR_FILE: str((folder / "error.json").absolute()),
            STACKS_FILE: str((folder / "stacks.txt").absolute()),
        }
        process = self._standby.take(rank, child)
        if process is None:
            process = _start(command(self._config), child, stdin=subprocess.DEVNULL)
            self._guard.add(process.pid)
        worker = Worker(rank, process, folder, address)
        self.all.append(worker)
        for name, source, terminal in (
            ("stdout", process.stdout, sys.stdout),
            ("stderr", process.stderr, sys.stderr),
        ):
            assert source is not None
            shown = terminal if name in self._config.terminal else None
            log = folder / f"{name}.log" if name in self._config.files else None
            prefix = f"[worker {rank:>{self._width}}] "
            reader = threading.Thread(
                target=_read, args=(worker, source, log, shown, prefix), daemon=True
            )
            reader.start()
            worker.readers.append(reader)
        return worker

    def running(self) -> list[Worker]:
        """Returns the workers that have not ended, and notes when the others did."""
        running = []
        for worker in self.all:
            if worker.process.poll() is None:
                running.append(worker)
            elif worker.exited_s is None:
                worker.exited_s = min(time.monotonic(), *worker.silent_s)
                self._guard.remove(worker.process.pid)
        return running

    def signal(self, number: int) -> None:
        """Sends a signal to each worker that runs; what it has started, it ends itself."""
        for worker in self.running():
            worker.process.send_signal(number)

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM to all, waits, and sends SIGKILL to those that are left."""
        if grace_s:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # one that is frozen hears it only then
            deadline = time.monotonic() + grace_s
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.02)
        for worker in self.all:
            send(worker.process.pid, signal.SIGKILL)  # the group: also what it left behind
        for worker in self.all:
            worker.process.wait()
        self.running()


def _read(worker: Worker, source: IO[bytes], *rest: Any) -> None:
    copy_lines(source, *rest)
    worker.silent_s.append(time.monotonic())  # its end, nearer than the next look at it


def copy_lines(source: IO[bytes], log: Path | None, terminal: IO[str] | None, prefix: str) -> None:
    """Copies a stream line by line to a file as it is, and to the terminal with a prefix."""
    with open(log, "ab", buffering=0) if log else contextlib.nullcontext() as file, source:
        for line in iter(source.readline, b""):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk does not end the run
                    file.write(line)
            if terminal is not None:
                text = line.decode(errors="replace").replace("\b", "").rstrip("\r\n")
                with contextlib.suppress(OSError, ValueError):
                    terminal.write(f"{prefix}{text.rpartition(chr(13))[2]}\n")
                    terminal.flush()
