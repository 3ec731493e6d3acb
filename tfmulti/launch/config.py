"""What the launcher is asked to do: `LaunchConfig`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tfmulti.errors import ConfigError
from tfmulti.launch.hosts import Host


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One job: the program, where its workers run, and what happens when one fails.

    Args:
        program: the script or module and its arguments.
        module: whether `program[0]` is a module, as in `python -m`.
        python: whether it is Python's at all; else `program[0]` is a command.
        per_node: workers on a machine whose entry does not say it: a number, auto, cpu or gpu.
        hosts: the machines; none: this one alone.
        hostfile: a file that names them, read again as the job runs.
        discovery: a command that prints them, run again as the job runs.
        nodes: the least and the most machines; None: all that are named, and each of them.
        min_workers: the least workers; None: all, or one where `nodes` leaves a choice.
        node_rank: of this machine, where the command is started by hand on each; else None.
        master_port: of the first machine, to which the others connect when started by hand.
        secret: what all machines know and prove to each other; empty: none. Over SSH one is made.
        insecure: whether machines started by hand may do without.
        isolate: whether the workers get a network of their own, on this machine alone.
        ssh: the command that runs another one on a machine whose name follows it.
        max_restarts: starts of the whole job without progress, after the first.
        monitor_interval_s: between two looks at the workers.
        log_dir: of all workers' output, a folder an attempt.
        terminal: the streams of a worker that go to the terminal.
        files: those that go to files.
        start_timeout_s: for all machines to answer, for all workers to listen, and without a sign
            of life before they train.
        shutdown_grace_s: from SIGTERM to SIGKILL.
        stall_timeout_s: without the end of any step; at least five of the longest steps.
        standby: whether processes with TensorFlow imported wait for the next attempt.

    Raises:
        ConfigError: a value breaks its rule.
    """

    program: tuple[str, ...]
    module: bool = False
    python: bool = True
    per_node: str = "1"
    hosts: tuple[Host, ...] = ()
    hostfile: Path | None = None
    discovery: str | None = None
    nodes: tuple[int, int] | None = None
    min_workers: int | None = None
    node_rank: int | None = None
    master_port: int = 29500
    secret: str = field(default="", repr=False)
    insecure: bool = False
    isolate: bool = False
    ssh: str = "ssh"
    max_restarts: int = 3
    monitor_interval_s: float = 0.1
    log_dir: Path = Path("logs")
    terminal: tuple[str, ...] = ("stdout", "stderr")
    files: tuple[str, ...] = ("stdout", "stderr")
    start_timeout_s: float = 300.0
    shutdown_grace_s: float = 30.0
    stall_timeout_s: float = 15.0
    standby: bool = True

    def __post_init__(self) -> None:
        self._check_program()
        self._check_machines()

    def _check_program(self) -> None:
        if not self.program:
            raise ConfigError(
                "no program was given. Write: python -m tfmulti.launch --nproc-per-node 2 "
                "-m tfmulti.fit …, or a script of your own."
            )
        name = self.program[0]
        if self.python and not self.module and not Path(name).is_file():
            raise ConfigError(f"there is no script {name!r}. Give its path, or -m for a module.")
        if not self.python and shutil.which(name) is None:
            raise ConfigError(f"there is no command {name!r}. Give its path.")

    def _check_machines(self) -> None:
        named = [
            flag
            for flag, value in (
                ("--hosts", self.hosts),
                ("--hostfile", self.hostfile),
                ("--host-discovery-script", self.discovery),
            )
            if value
        ]
        if self.isolate and named:
            raise ConfigError(
                f"--isolate takes the network away, but {named[0]} names machines that need it. "
                "Leave one of them out."
            )
        if len(named) > 1:
            raise ConfigError(f"{named[0]} and {named[1]} both name machines. Give one of them.")
        if self.nodes and self.nodes[1] > 1 and not named:
            raise ConfigError(
                f"--nnodes {self.nodes[1]}, but no machine is named. Give --hosts h1:N,h2:N, "
                "--hostfile or --host-discovery-script."
            )
        if self.node_rank and (self.discovery or not named):
            raise ConfigError(
                "--node-rank is the place of this machine in --hosts or --hostfile. Give one of "
                "them, the same on each machine."
            )
        if self.hosts and self.nodes and self.nodes[0] > len(self.hosts):
            raise ConfigError(
                f"--nnodes wants {self.nodes[0]} machines, but --hosts names {len(self.hosts)}. "
                "Name more, or want less."
            )

    @property
    def by_hand(self) -> bool:
        """Whether this command is started on each machine."""
        return self.node_rank is not None and bool(self.hosts or self.hostfile)


def check_devices(workers: int, gpus: int, where: str = "this machine") -> None:
    """Checks that a machine's GPUs can be shared evenly by its workers.

    Raises:
        ConfigError: there are fewer than workers, or some would be left over.
    """
    if gpus and workers > gpus:
        raise ConfigError(
            f"{workers} workers are more than the {gpus} GPUs of {where}, and each worker needs "
            f"its own. Use at most {gpus} (--nproc-per-node), or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=''."
        )
    if gpus and gpus % workers:
        raise ConfigError(
            f"the {gpus} GPUs of {where} cannot be shared evenly by {workers} workers, and "
            f"TensorFlow wants as many on each. Use a divisor of {gpus} (--nproc-per-node), or set "
            "CUDA_VISIBLE_DEVICES to fewer."
        )
