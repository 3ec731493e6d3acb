"""Reads the command line of the launcher into a LaunchConfig. The flags have torchrun's names."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmulti.cluster.allocation import CHIEF_HOST, allocated_hosts
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import lsf, mpi, recognised_in, slurm, tf_config
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.cluster.job_secret import secret_of
from tfmulti.config.command_line import Parser
from tfmulti.errors import ClusterError, ConfigError
from tfmulti.launch.config import SRUN, LaunchConfig, check_devices
from tfmulti.launch.hosts import Host, parse_hosts, slots_of

# What the values of --tee and --redirects mean, as in torchrun.
STREAMS: dict[str, tuple[str, ...]] = {
    "0": (),
    "1": ("stdout",),
    "2": ("stderr",),
    "3": ("stdout", "stderr"),
}

_SHORT = {"module": "-m", "tee": "-t", "redirects": "-r"}

# The default of each flag that has one, as text.
_DEFAULTS = {"tee": "3", "redirects": "0"} | {
    flag: str(getattr(LaunchConfig, field)).removesuffix(".0")
    for flag, field in (
        ("nproc-per-node", "per_node"),
        ("master-port", "master_port"),
        ("ssh", "ssh"),
        ("max-restarts", "max_restarts"),
        ("monitor-interval", "monitor_interval_s"),
        ("start-timeout", "start_timeout_s"),
        ("shutdown-grace-s", "shutdown_grace_s"),
        ("stall-timeout-s", "stall_timeout_s"),
    )
}

# The help of each flag. The key is the flag with the placeholder of its value; a switch has none.
_HELP = {
    "nproc-per-node N|auto|cpu|gpu": (
        "Workers on a machine. auto: one a GPU, or one; gpu: one a GPU; cpu: one a core."
    ),
    "hosts H1:N,H2:N": "Machines and the workers on each, started over SSH.",
    "hostfile FILE": "The same as a file: a line `host slots=N` for each.",
    "host-discovery-script CMD": (
        "A program that prints the current machines, one host:N per line. It runs every 5 s."
    ),
    "nnodes N|MIN:MAX": (
        "Number of machines. With a range the job continues while MIN machines answer, and takes "
        "more at the next checkpoint. Default: all machines that are named."
    ),
    "min-workers N": (
        "Smallest number of workers with which the job continues. Default: all, or one with "
        "--nnodes MIN:MAX."
    ),
    "node-rank N": (
        "Rank of this machine in --hosts, if you start this command on each machine yourself."
    ),
    "master-port PORT": "Port at which the first machine accepts the others, with --node-rank.",
    "secret-file FILE": (
        "File with the job's secret, readable only by you (chmod 600), for machines that you "
        "start yourself. They prove to each other that they know it. Or set TFMULTI_SECRET."
    ),
    "isolate": (
        "Run the workers, all on this machine, in a separate network namespace. Nobody else can "
        "reach TensorFlow's ports, and the workers reach no other machine."
    ),
    "insecure": "Allow machines with --node-rank to have no secret.",
    "ssh CMD": "How to run a command on another machine, as in 'ssh -p 2222'; srun: by Slurm.",
    "max-restarts N": "Number of restarts without progress. Progress resets the count.",
    "monitor-interval S": "Seconds between two checks of the workers.",
    "log-dir DIR": (
        "Folder of the workers' output and errors. Default: logs/ in the --run_dir that the "
        "program is given, else logs/ here."
    ),
    "tee STREAMS": (
        "Streams that are shown on the terminal and also written to files: 0 none, 1 stdout, 2 "
        "stderr, 3 both."
    ),
    "redirects STREAMS": "Streams that are only written to files.",
    "start-timeout S": (
        "Time limit in seconds for all machines to answer, for all workers to listen once one of "
        "them does, and for workers that do nothing before they train. Workers that use cores, "
        "but show no progress (new text, disk, memory; the network does not count), have ten times "
        "as long. A line that differs from an earlier one only in numbers is not new, unless it "
        "tells a part of a whole, such as 17/100."
    ),
    "shutdown-grace-s S": "Seconds from SIGTERM to SIGKILL.",
    "stall-timeout-s S": (
        "Restart the job if no step ends for so many seconds, and for five times the longest "
        "step; 0: never."
    ),
    "no-standby": (
        "Keep no standby processes that have imported TensorFlow. This saves 0.4 GB a worker, and "
        "makes a restart four seconds slower."
    ),
    "module": "The program is a module, as in python -m.",
    "no-python": "The program is a command, not a Python script.",
}


def make_parser(doc: str) -> Parser:
    """Returns the parser of the launcher's own flags, which accept `_` in place of `-`.

    Args:
        doc: the description that `--help` shows.
    """
    parser = Parser("python -m tfmulti.launch", doc)
    for flag, text in _HELP.items():
        name, _, metavar = flag.partition(" ")
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        names = [*([_SHORT[name]] if name in _SHORT else []), *spellings]
        if not metavar:
            parser.add_argument(*names, action="store_true", help=text)
        else:
            default = _DEFAULTS.get(name)
            shown = f" Default: {default}." if default else ""
            parser.add_argument(*names, default=default, metavar=metavar, help=text + shown)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="What the workers run.")
    return parser


def parse(argv: Sequence[str], doc: str, env: Mapping[str, str] = os.environ) -> LaunchConfig:
    """Returns the configuration that a command line asks for.

    Args:
        argv: the arguments, without the name of the command.
        doc: the description that `--help` shows.
        env: the environment, which may hold the secret of the job and CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: a flag is unknown, a value breaks its rule, or the GPUs of this machine cannot
            be shared evenly by its workers.
        ClusterError: the scheduler's list of hosts cannot be read, or it has started several
            launchers.
        SystemExit: the help was asked for and has been shown.
    """
    values = make_parser(doc).parsed(argv)
    program = values.program[1:] if values.program[:1] == ["--"] else values.program
    also_files = _streams("tee", values.tee)
    only_files = _streams("redirects", values.redirects)
    hosts, ssh = parse_hosts(values.hosts) if values.hosts is not None else (), values.ssh
    if not (hosts or values.hostfile or values.host_discovery_script or values.isolate):
        hosts, ssh = _allocated(values.nnodes, ssh, env)
    if values.nproc_per_node not in ("auto", "gpu", "cpu"):
        _whole("nproc-per-node", values.nproc_per_node, 1)
    config = LaunchConfig(
        program=tuple(program),
        module=values.module,
        python=not values.no_python,
        per_node=values.nproc_per_node,
        hosts=hosts,
        hostfile=Path(values.hostfile) if values.hostfile else None,
        discovery=values.host_discovery_script,
        nodes=_range("nnodes", values.nnodes),
        min_workers=_whole("min-workers", values.min_workers, 1) if values.min_workers else None,
        node_rank=_whole("node-rank", values.node_rank, 0) if values.node_rank else None,
        master_port=_whole("master-port", values.master_port, 1),
        secret=secret_of(env, Path(values.secret_file) if values.secret_file else None),
        insecure=values.insecure,
        isolate=values.isolate,
        ssh=ssh,
        max_restarts=_whole("max-restarts", values.max_restarts, 0),
        monitor_interval_s=_seconds("monitor-interval", values.monitor_interval),
        log_dir=Path(values.log_dir) if values.log_dir else _default_log_dir(program),
        terminal=tuple(name for name in STREAMS["3"] if name not in only_files),
        files=tuple(dict.fromkeys([*also_files, *only_files])),
        start_timeout_s=_seconds("start-timeout", values.start_timeout),
        shutdown_grace_s=_seconds("shutdown-grace-s", values.shutdown_grace_s),
        stall_timeout_s=_seconds("stall-timeout-s", values.stall_timeout_s) or math.inf,
        standby=not values.no_standby and not values.no_python,
    )
    # Other machines are asked for their GPUs when they answer.
    if not (config.hosts or config.hostfile or config.discovery):
        gpus = len(visible_gpus(env))
        check_devices(slots_of(config.per_node, gpus), gpus)
    return config


def _allocated(
    nnodes: str | None, ssh: str, env: Mapping[str, str]
) -> tuple[tuple[Host, ...], str]:
    """Returns the machines of a scheduler's allocation, and how to start workers on them.

    An allocation of one machine needs no list, and `--nnodes 1` asks for this machine alone.

    Raises:
        ClusterError: the scheduler's list of hosts cannot be read, or this launcher is one of
            several that the scheduler has started.
    """
    if nnodes != "1":
        _check_alone(env)
    names = allocated_hosts({k: v for k, v in env.items() if k != CHIEF_HOST})
    if len(names) < 2 or nnodes == "1":
        return (), ssh
    by_slurm = "SLURM_JOB_NODELIST" in env and ssh == "ssh"
    return parse_hosts(",".join(names), "the allocation"), SRUN if by_slurm else ssh


# The programs that start processes in these environments. Others have the names of their own.
# The commands that start processes within an allocation. Elsewhere a platform starts the machines.
_STARTERS = {mpi.NAME: "mpirun", slurm.NAME: "srun", lsf.NAME: "jsrun"}


def _check_alone(env: Mapping[str, str]) -> None:
    """Checks that the scheduler has not started other launchers beside this one.

    Raises:
        ClusterError: it has, and each would start all workers of the job.
    """
    for module in recognised_in(env):
        if module is tf_config and Cluster.from_tf_config(env["TF_CONFIG"]).size == 1:
            continue
        starter = _STARTERS.get(module.NAME)
        if starter is None:
            place = "TF_CONFIG" if module is tf_config else module.NAME
            raise ClusterError(
                f"{place} names several workers, and on each of them a launcher would start a "
                "whole job. Leave out 'tfmulti launch': the training reads its place from "
                f"{place} itself. --nnodes 1 asks for a job on each machine."
            )
        raise ClusterError(
            f"{starter} has started several launchers, and each would start a whole job. Run "
            f"tfmulti launch without {starter}, once in the allocation; or let {starter} start "
            "the training itself. --nnodes 1 asks for a job on each machine."
        )


def _default_log_dir(program: Sequence[str]) -> Path:
    """Returns logs/ in the --run_dir that the program is given, or else in the current folder."""
    for at, word in enumerate(program):
        name, equals, value = word.partition("=")
        if name in ("--run_dir", "-run_dir"):
            if equals:
                return Path(value) / "logs"
            if at + 1 < len(program):
                return Path(program[at + 1]) / "logs"
    return Path("logs")


def _range(name: str, text: str | None) -> tuple[int, int] | None:
    """Returns the bounds of `N` or `MIN:MAX`, or raises ConfigError."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    least = _whole(name, low, 1)
    most = _whole(name, high, 1) if colon else least
    if most < least:
        raise ConfigError(f"--{name} is {text!r}, but MIN:MAX must not fall. Write {high}:{low}.")
    return least, most


def _whole(name: str, text: str, low: int) -> int:
    """Returns a whole number that is at least `low`, or raises ConfigError."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ConfigError(f"--{name} is {text!r}, but it must be a whole number from {low}.")
    return value


def _seconds(name: str, text: str) -> float:
    """Returns a finite number of seconds that is not negative, or raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"--{name} is {text!r}, but it must be a number of seconds.")
    return value


def _streams(name: str, text: str) -> tuple[str, ...]:
    """Returns the names of the streams that 0, 1, 2 or 3 stands for, or raises ConfigError."""
    if text not in STREAMS:
        raise ConfigError(
            f"--{name} is {text!r}, but it must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)."
        )
    return STREAMS[text]
