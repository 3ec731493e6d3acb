"""The configuration of the launcher, `LaunchConfig`, and the rules for its values."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tfmulti.errors import ConfigError
from tfmulti.launch.hosts import Host

# The value of `LaunchConfig.ssh` that starts remote workers by Slurm.
SRUN = "srun"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Describes a job: the program, where its workers run, and what happens when one fails.

    Args:
        program: the script or module and its arguments.
        module: whether `program[0]` is a module, as in `python -m`.
        python: whether the program is written in Python. If not, `program[0]` is a command.
        per_node: the number of workers on a machine whose entry gives none: a number, auto, cpu or
            gpu.
        hosts: the machines. Empty: those of `hostfile` or `discovery`, or else this machine.
        hostfile: a file that names the machines. It is read again while the job runs.
        discovery: a command that prints the machines. It is run again while the job runs.
        nodes: the least and the greatest number of machines. None: all machines that are named, or
            any number from one with `discovery` or `min_workers`.
        min_workers: the least number of workers. None: all workers, or one if the number of
            machines may vary.
        node_rank: the index of this machine in the list of machines, if the user starts the command
            by hand on each machine. Else None.
        master_port: the port of the first machine, to which the others connect if they are started
            by hand.
        secret: the secret of the job, which all machines know. Empty: none is given. The launcher
            makes a random one, unless the machines are started by hand.
        insecure: whether machines that are started by hand may do without a secret.
        isolate: whether the workers, all on this machine, get a network of their own.
        ssh: the command that runs a command on another machine, without the machine's name. `srun`
            starts it by Slurm, in the allocation of the launcher.
        max_restarts: the allowed number of restarts of the whole job without progress.
        monitor_interval_s: the time between two checks of the workers.
        log_dir: the folder for the output of the workers, with one folder for each attempt.
        terminal: the streams of a worker that go to the terminal.
        files: the streams of a worker that go to files.
        start_timeout_s: the time limit for all machines to answer, for all workers to listen once
            one of them does, and without a sign of life before training.
        shutdown_grace_s: the time from SIGTERM to SIGKILL.
        stall_timeout_s: the time limit without the end of any step. The limit is at least five
            times the longest step.
        standby: whether processes that have imported TensorFlow wait for the next attempt.

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
        """Raises ConfigError if no program is given, or if it does not exist."""
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
        """Raises ConfigError if the values that name or count machines contradict each other."""
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
        # torchrun's users give --node-rank 0 on a single machine, where it says nothing.
        if self.node_rank is not None and (self.discovery or (self.node_rank and not named)):
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
        """Whether the user starts the command by hand on each machine."""
        return self.node_rank is not None and bool(self.hosts or self.hostfile)

    @property
    def hosts_may_change(self) -> bool:
        """Whether other machines may be named while the job runs."""
        return bool(self.hostfile or self.discovery)


def check_devices(workers: int, gpus: int, where: str = "this machine") -> None:
    """Checks that the workers of a machine can share its GPUs evenly.

    Args:
        workers: the number of workers on the machine.
        gpus: the number of GPUs of the machine. 0 passes every check.
        where: the machine, in words for the error message.

    Raises:
        ConfigError: there are fewer GPUs than workers, or some GPUs would be left over.
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
